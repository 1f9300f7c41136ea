// SPDX-License-Identifier: BSD-3-Clause
// optimizer.step() on the host: check that nothing moved, gather gradients, refresh the table of
// hyper-parameters where a value changed, one launch a device and dtype (two with clipping or a
// loss scale if the model is large, three under LARS). A call costs microseconds.
#pragma once

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <string>
#include <unordered_set>
#include <vector>

#include "backend.h"
#include "checks.h"
#include "hyper_rows.h"
#include "python_objects.h"
#include "update.h"

namespace torch_renaissance {

inline constexpr int kFitsNoLaunch = -1;

// An entry of optimizer.state. Those of parameters left to torch come and go unwatched.
struct Entry {
  PyObject *key, *value;
  bool watched;
};

// A state tensor as it was when the plan was made: the object and where its data lay.
struct StateValue {
  PyObject* object;
  const void* data;
};

struct Parameter {
  PyObject* object;
  const void* data;
  at::ScalarType dtype;
  c10::Device device;
  c10::DimVector sizes, strides;
  int group;
  int row;
  int launch;  // kFitsNoLaunch until it has had a gradient
  int64_t slot;
  int planes;  // how many state planes its segment has
  bool has_state;
  int segment;          // within the launch
  int64_t offset;       // within the segment's planes
  at::Tensor low;       // its 16-bit copy, if it has one
  int64_t low_version;  // of the parameter, when the copy was made
  bool accumulated;     // has had a gradient since begin_accumulation()
  bool updated;         // has had a gradient in a step, or in the capture of one
};

// One op's worth of work: what sgd_ or adam_ would be told, kept from step to step.
struct Launch {
  std::vector<at::Tensor> held;  // planes, steps and chunks, whose addresses `update` has
  std::vector<at::Tensor> packed;
  at::Tensor counters, hyper, chain, partials;
  at::Tensor scale, found_inf;       // GradScaler's, for the time of a step
  std::vector<int32_t> first_chunk;  // by slot
  Update update;
  std::vector<Slot> slots;
  bool active;                                            // some slot has a gradient
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (.grad, its copy in the right layout)
};

class HostStep {
 public:
  // What run() and its like answer. Unless kDone, nothing has been changed.
  enum Answer { kDone, kOutdated, kUnsupported, kHasGradients, kHasHooks };
  // Where run() finds gradients: in .grad; there, packed meanwhile; or only in the packed planes.
  enum Source { kGather, kPacked, kAccumulated };

  explicit HostStep(const std::string& rule)
      : rule_(rule == "adam"   ? Rule::kAdam
              : rule == "lars" ? Rule::kLars
                               : Rule::kSgd),
        hyper_(rule_) {}

  // Takes a plan over: groups as lists of parameters, the optimizer's state, what each parameter
  // is (`entries`), those that have no slot unless they get a gradient (`frozen`), and the
  // launches. Holds all objects, so that an identity is never reused.
  void set_plan(const py::list& groups,
                const py::dict& state,
                const py::list& entries,
                const py::list& frozen,
                const py::list& launches) {
    std::unordered_set<PyObject*> accumulated, updated;
    for (const Parameter& p : parameters_) {
      if (p.accumulated) accumulated.insert(p.object);
      if (p.updated) updated.insert(p.object);
    }
    groups_.clear();
    parameters_.clear();
    state_.clear();
    values_.clear();
    launches_.clear();
    tables_.clear();
    averages_ = false;
    hyper_.forget();
    held_.clear();
    frozen_.clear();
    for (const auto& p : frozen) frozen_.push_back(p.ptr());
    for (const auto& group : groups) {
      std::vector<PyObject*> objects;
      for (const auto& p : group) {
        objects.push_back(p.ptr());
        hold(p.ptr());
      }
      groups_.push_back(std::move(objects));
    }
    for (const auto& item : launches) add_launch(py::cast<py::dict>(item));
    for (const auto& entry : entries) add_parameter(py::cast<py::dict>(entry));
    for (Parameter& p : parameters_) {
      p.accumulated = accumulated.count(p.object) != 0;
      p.updated = updated.count(p.object) != 0;
    }
    std::unordered_set<PyObject*> ours;
    for (const Parameter& p : parameters_) ours.insert(p.object);
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &value);) {
      state_.push_back({key, value, ours.count(key) != 0 && PyDict_Check(value)});
      hold(key);
      hold(value);
      if (!state_.back().watched) continue;
      PyObject *inner_key = nullptr, *inner = nullptr;
      for (Py_ssize_t i = 0; PyDict_Next(value, &i, &inner_key, &inner);) {
        hold(inner);
        values_.push_back({inner, is_tensor(inner) ? data_of(inner) : nullptr});
      }
    }
    const std::vector<const void*> now = fingerprint();
    if (now != fingerprint_) ++generation_;
    fingerprint_ = now;
  }

  // One step of the optimizer whose attributes are `own`. `prepared`: a call of ready() with the
  // same arguments has just seen to the hyper-parameters, so that a capture needn't.
  int run(const py::dict& own,
          int source,
          const py::object& amp,
          int64_t micro_batches,
          bool prepared) {
    static PyObject *const grad_scale = name("grad_scale"), *const found_inf = name("found_inf");
    const auto loss_scale = LossScale::from(amp);
    if (!begin(own, loss_scale, micro_batches, prepared)) return kOutdated;
    const int answer = source == kAccumulated ? gather_accumulated() : gather();
    if (answer != kDone) return answer;
    const auto scale = scalar(own, grad_scale), inf = scalar(own, found_inf);
    const bool couples = clips_ || loss_scale.has_value(), norms = couples || rule_ == Rule::kLars;
    if (couples) check_one_device(loss_scale);
    if (source == kPacked) use_packed();
    if (!prepared) hyper_.write(tables_);

    const bool extras = norms || averages_ || micro_batches != 1;
    bool counts_skips = true;
    for (size_t i = 0; i < launches_.size(); ++i) {
      Launch& launch = launches_[i];
      if (!launch.active) continue;
      // To the CPU it must block: the value is read at once.
      const auto on_device = [&](const std::optional<at::Tensor>& t) {
        const bool non_blocking = launch.counters.is_cuda();
        return t ? t->to(launch.counters.device(), at::kFloat, non_blocking) : at::Tensor();
      };
      launch.scale = on_device(scale);
      launch.found_inf = on_device(inf);
      Update& u = launch.update;
      u.grad_scale = launch.scale.defined() ? launch.scale.const_data_ptr<float>() : nullptr;
      u.found_inf = launch.found_inf.defined() ? launch.found_inf.const_data_ptr<float>() : nullptr;
      u.counts_skips = counts_skips;
      u.control = extras || has_flags(launch) ? control_of(launch) : nullptr;
      u.chain = norms ? launch.chain.const_data_ptr<double>() : nullptr;
      u.ends_step = ends_step(i);
      counts_skips = false;
    }
    const bool updated = norms && find_norm(loss_scale);
    for (Launch& launch : launches_) {
      if (!launch.active) continue;
      if (!updated) {
        std::optional<py::gil_scoped_release> release;
        if (launch.counters.is_cpu()) release.emplace();
        backend_of(launch.counters).update(launch.update, launch.counters);
      }
      if (launch.scale.defined()) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        for (auto& [grad, copy] : launch.copies) grad.copy_(copy);
      }
    }
    // While the device works: autograd must see that the parameters changed in place.
    for (Parameter& p : parameters_) {
      if (!takes_part(p)) continue;
      p.updated = true;
      bump(p);
      if (!scale) continue;
      const at::Tensor& grad = unpack(p.object).unsafeGetTensorImpl()->grad();
      if (grad.defined()) grad.unsafeGetTensorImpl()->bump_version();
    }
    for (Launch& launch : launches_) {
      launch.copies.clear();
      launch.scale.reset();
      launch.found_inf.reset();
    }
    hyper_.ema_calls += !prepared;
    return kDone;
  }

  // Copies the gradients into each launch's packed planes.
  int pack(const py::dict& own) {
    if (!begin(own, std::nullopt, 1, false)) return kOutdated;
    const int answer = gather();
    if (answer == kDone) put_into_planes(false);
    return answer;
  }

  // Makes sums of gradients start from zero.
  void begin_accumulation() {
    for (Launch& launch : launches_) {
      for (at::Tensor& plane : launch.packed) plane.zero_();
    }
    for (Parameter& p : parameters_) p.accumulated = false;
  }

  // Adds the gradients to the sums in the packed planes. `prepared` as in run().
  int accumulate(const py::dict& own, bool prepared) {
    if (!begin(own, std::nullopt, 1, prepared)) return kOutdated;
    const int answer = gather();
    if (answer != kDone) return answer;
    put_into_planes(true);
    for (Parameter& p : parameters_) {
      p.accumulated = p.accumulated || takes_part(p);
      p.updated = p.updated || takes_part(p);
    }
    return kDone;
  }

  // Which parameters the last launches had a gradient of, and a replay's way to say that the sums
  // have one of them.
  std::vector<bool> taking_part() const {
    std::vector<bool> found;
    for (const Parameter& p : parameters_) found.push_back(takes_part(p));
    return found;
  }
  void add_accumulated(const std::vector<bool>& found) {
    for (size_t i = 0; i < found.size() && i < parameters_.size(); ++i) {
      parameters_[i].accumulated = parameters_[i].accumulated || found[i];
    }
  }

  // Before a replay of captured work: nothing has moved, no gradient is left over, the device
  // knows this step's hyper-parameters and the 16-bit copies are those of the weights.
  // `updates`: the work updates the parameters.
  int ready(const py::dict& own, const py::object& amp, int64_t micro_batches, bool updates) {
    if (!begin(own, LossScale::from(amp), micro_batches, false)) return kOutdated;
    for (PyObject* p : frozen_) {
      if (unpack(p).unsafeGetTensorImpl()->grad().defined()) return kHasGradients;
    }
    for (const Parameter& p : parameters_) {
      if (unpack(p.object).unsafeGetTensorImpl()->grad().defined()) return kHasGradients;
      if (has_hooks(p.object)) return kHasHooks;
      if (p.updated && lacks_state(p)) return kOutdated;
    }
    hyper_.write(tables_);
    hyper_.ema_calls += updates;
    refresh_low();
    return kDone;
  }

  // After a replay: what run() tells autograd.
  void replayed() {
    for (Parameter& p : parameters_) bump(p);
  }

  // 16-bit copies of weights that have changed in place since they were made.
  void refresh_low() {
    for (Parameter& p : parameters_) {
      if (!p.low.defined() || p.low_version == version_of(p)) continue;
      const at::AutoDispatchBelowADInplaceOrView guard;
      p.low.copy_(unpack(p.object));
      p.low_version = version_of(p);
    }
  }

  // Whether everything is where the plan has it.
  bool fits(const py::dict& own) const {
    static PyObject *const groups = name("param_groups"), *const state = name("state");
    return unchanged(get(own.ptr(), groups), get(own.ptr(), state));
  }

  // Where the last norm of the gradients is; None before the first.
  py::object chain() const {
    if (!chain_.defined()) return py::none();
    return wrap(chain_);
  }

  // Changes when work captured before would write to the wrong places or leave something out.
  int64_t generation() const { return generation_; }

  // How many updates the last step launched.
  int64_t launched() const {
    return std::count_if(
        launches_.begin(), launches_.end(), [](const Launch& l) { return l.active; });
  }

  // After kUnsupported: which entries have a gradient that the kernels don't take.
  std::vector<int64_t> unsupported() const { return unsupported_; }

  int64_t ema_calls() const { return hyper_.ema_calls; }
  void set_ema_calls(int64_t calls) { hyper_.ema_calls = calls; }

 private:
  void hold(PyObject* o) { held_.push_back(py::reinterpret_borrow<py::object>(o)); }

  static int64_t version_of(const Parameter& p) {
    return unpack(p.object).unsafeGetTensorImpl()->version_counter().current_version();
  }

  // A copy that was fresh before the kernels wrote both is fresh after it.
  static void bump(Parameter& p) {
    const bool fresh = p.low.defined() && p.low_version == version_of(p);
    unpack(p.object).unsafeGetTensorImpl()->bump_version();
    if (fresh) p.low_version = version_of(p);
  }

  bool takes_part(const Parameter& p) const {
    return p.launch != kFitsNoLaunch && launches_[p.launch].slots[p.slot].grad != nullptr;
  }

  bool lacks_state(const Parameter& p) const {
    const int needed = hyper_.planes_needed[p.group];
    return p.planes < needed || (needed > 0 && !p.has_state);
  }

  static bool has_flags(const Launch& launch) {
    return std::any_of(launch.slots.begin(), launch.slots.end(), [](const Slot& s) {
      return s.grad != nullptr && s.flags != 0;
    });
  }

  static const double* control_of(const Launch& launch) {
    return launch.hyper.const_data_ptr<double>() + (launch.hyper.size(0) - 1) * kHyperColumns;
  }

  // Whether launch `at` is the first, or the last, active one of its device.
  bool starts_step(size_t at) const { return !any_beside(at, 0, at); }
  bool ends_step(size_t at) const { return !any_beside(at, at + 1, launches_.size()); }
  bool any_beside(size_t at, size_t begin, size_t end) const {
    for (size_t i = begin; i < end; ++i) {
      if (launches_[i].active && launches_[i].counters.is_same(launches_[at].counters)) return true;
    }
    return false;
  }

  void check_one_device(const std::optional<LossScale>& loss_scale) const {
    const Launch* first = nullptr;
    for (const Launch& launch : launches_) {
      if (!launch.active) continue;
      if (first == nullptr) first = &launch;
      const c10::Device device = launch.counters.device(), expected = first->counters.device();
      TORCH_CHECK(device == expected,
                  "max_grad_norm and a loss scale need all parameters on one device, got ",
                  expected,
                  " and ",
                  device,
                  "; use torch.nn.utils.clip_grad_norm_ instead");
      TORCH_CHECK(!loss_scale || loss_scale->scale.device() == device,
                  "the loss scale is on ",
                  loss_scale ? loss_scale->scale.device() : device,
                  ", the parameters are on ",
                  device);
    }
  }

  // Returns whether the update, too, is done: it is where one launch can do both.
  bool find_norm(const std::optional<LossScale>& loss_scale) {
    const bool wide = std::any_of(launches_.begin(), launches_.end(), [](const Launch& l) {
      return l.active && l.update.dtype == ScalarType::kDouble;
    });
    for (size_t i = 0; i < launches_.size(); ++i) {
      Launch& launch = launches_[i];
      if (!launch.active) continue;
      Norm n{};
      const Update& u = launch.update;
      n.dtype = u.dtype;
      n.slots = u.slots;
      n.n_slots = u.n_slots;
      std::copy(u.segments, u.segments + u.n_segments, n.segments);
      n.n_segments = u.n_segments;
      n.control = control_of(launch);
      n.chain = launch.chain.data_ptr<double>();
      n.partials = launch.partials.data_ptr<double>();
      n.counters = u.counters;
      n.grad_scale = u.grad_scale;
      if (loss_scale) {
        n.loss_scale = loss_scale->scale.data_ptr<float>();
        n.growth_tracker = loss_scale->growth_tracker.data_ptr<int32_t>();
      }
      n.first = starts_step(i);
      n.last = ends_step(i);
      n.wide = wide;
      chain_ = launch.chain;
      const Backend& backend = backend_of(launch.counters);
      if (rule_ == Rule::kLars) {
        n.first_chunk = launch.first_chunk.data();
        backend.slot_norms(n, launch.counters);
      } else if (n.first && n.last && backend.checked_update != nullptr &&
                 backend.checked_update(n, u, launch.counters)) {
        return true;  // all active launches of a step with a norm are on one device: this was it
      } else {
        backend.norm(n, launch.counters);
      }
    }
    return false;
  }

  void put_into_planes(bool adds) {
    for (Launch& launch : launches_) {
      Pack p{};
      p.dtype = launch.update.dtype;
      p.slots = launch.slots.data();
      p.n_slots = launch.update.n_slots;
      p.n_segments = launch.update.n_segments;
      p.adds = adds;
      for (int i = 0; i < p.n_segments; ++i) {
        p.segments[i] = launch.update.segments[i];
        p.segments[i].planes[0] = launch.packed[i].data_ptr();
      }
      backend_of(launch.counters).pack(p, launch.counters);
      launch.copies.clear();
    }
  }

  void add_launch(const py::dict& from) {
    Launch launch{};
    const auto tensor = [&](const char* key) { return unpack(py::object(from[key]).ptr()); };
    launch.counters = tensor("counters");
    launch.hyper = tensor("hyper");
    launch.chain = tensor("chain");
    launch.partials = tensor("partials");
    const auto same = [&](const at::Tensor& t) { return t.is_same(launch.hyper); };
    if (std::none_of(tables_.begin(), tables_.end(), same)) tables_.push_back(launch.hyper);
    Update& u = launch.update;
    u.rule = rule_;
    u.counters = launch.counters.data_ptr<int32_t>();
    u.hyper = launch.hyper.const_data_ptr<double>();
    const auto keep = [&](const py::handle& t) -> const at::Tensor& {
      return launch.held.emplace_back(unpack(t.ptr()));
    };
    for (const auto& item : from["segments"]) {
      const auto segment = py::cast<py::dict>(item);
      Segment& to = u.segments[u.n_segments++];
      int p = 0;
      for (const auto& plane : segment["planes"]) {
        if (!plane.is_none()) to.planes[p] = keep(plane).data_ptr();
        ++p;
      }
      if (!segment["ema"].is_none()) to.ema = keep(segment["ema"]).data_ptr();
      if (!segment["low"].is_none()) to.low = keep(segment["low"]).data_ptr();
      averages_ = averages_ || to.ema != nullptr;
      if (!segment["norms"].is_none()) {
        to.norms = reinterpret_cast<SlotNorms*>(keep(segment["norms"]).data_ptr<double>());
      }
      to.steps = keep(segment["steps"]).data_ptr<float>();
      to.n_slots = static_cast<int32_t>(launch.held.back().numel());
      const at::Tensor& like = keep(segment["like"]);
      u.dtype = scalar_type("step", like);
      int32_t first_chunk = 0;
      for (const auto& numel : segment["numels"]) {
        launch.first_chunk.push_back(first_chunk);
        first_chunk += static_cast<int32_t>(chunks_of(numel.cast<int64_t>(), like.element_size()));
      }
      const at::Tensor& chunks = keep(segment["chunks"]);
      to.chunks = reinterpret_cast<const Chunk*>(chunks.const_data_ptr());
      to.n_chunks = chunks.size(0);
      to.first_slot = static_cast<int32_t>(u.n_slots);
      u.n_slots += to.n_slots;
      if (!segment["packed"].is_none()) launch.packed.push_back(unpack(segment["packed"].ptr()));
    }
    launch.slots.assign(u.n_slots, Slot{});
    launches_.push_back(std::move(launch));
    // A vector's memory stays where it is when the vector is moved.
    launches_.back().update.slots = launches_.back().slots.data();
  }

  void add_parameter(const py::dict& entry) {
    PyObject* object = py::object(entry["param"]).ptr();
    const at::Tensor& t = unpack(object);
    const int group = entry["group"].cast<int>();
    const bool decays = entry["decays"].cast<bool>();
    const py::object low = entry["low"];
    parameters_.push_back({object,
                           data_of(object),
                           t.scalar_type(),
                           t.device(),
                           c10::DimVector(t.sizes()),
                           c10::DimVector(t.strides()),
                           group,
                           2 * group + (decays ? 0 : 1),
                           entry["launch"].cast<int>(),
                           entry["slot"].cast<int64_t>(),
                           entry["planes"].cast<int>(),
                           entry["has_state"].cast<bool>(),
                           entry["segment"].cast<int>(),
                           entry["offset"].cast<int64_t>(),
                           low.is_none() ? at::Tensor() : unpack(low.ptr()),
                           -1,
                           false,
                           false});
  }

  // All addresses and places that a launch bakes in.
  std::vector<const void*> fingerprint() const {
    std::vector<const void*> found;
    const auto add_number = [&](int64_t n) { found.push_back(reinterpret_cast<const void*>(n)); };
    for (const Launch& launch : launches_) {
      const Update& u = launch.update;
      found.insert(found.end(), {u.hyper, u.counters, launch.chain.const_data_ptr()});
      for (int i = 0; i < u.n_segments; ++i) {
        const Segment& s = u.segments[i];
        found.insert(found.end(), s.planes, s.planes + kMaxPlanes);
        found.insert(found.end(), {s.ema, s.low, s.steps, s.norms, s.chunks});
      }
      for (const at::Tensor& plane : launch.packed) found.push_back(plane.const_data_ptr());
    }
    for (const Parameter& p : parameters_) {
      found.insert(found.end(), {p.object, p.data, p.low.defined() ? p.low.const_data_ptr() : 0});
      for (int64_t n : {int64_t{p.row}, int64_t{p.launch}, p.slot}) add_number(n);
    }
    return found;
  }

  bool unchanged(PyObject* param_groups, PyObject* state) const {
    if (!PyList_Check(param_groups) || !PyDict_Check(state)) return false;
    if (static_cast<Py_ssize_t>(groups_.size()) != PyList_GET_SIZE(param_groups)) return false;
    static PyObject* const params = name("params");
    for (size_t g = 0; g < groups_.size(); ++g) {
      PyObject* list = PyDict_GetItem(PyList_GET_ITEM(param_groups, g), params);
      if (list == nullptr || !PyList_Check(list)) return false;
      if (PyList_GET_SIZE(list) != static_cast<Py_ssize_t>(groups_[g].size())) return false;
      for (size_t i = 0; i < groups_[g].size(); ++i) {
        if (PyList_GET_ITEM(list, i) != groups_[g][i]) return false;
      }
    }
    if (PyDict_GET_SIZE(state) != static_cast<Py_ssize_t>(state_.size())) return false;
    PyObject *key = nullptr, *value = nullptr, *inner_key = nullptr, *inner = nullptr;
    size_t entry = 0, next = 0;
    for (Py_ssize_t at = 0; PyDict_Next(state, &at, &key, &value); ++entry) {
      if (state_[entry].key != key || state_[entry].value != value) return false;
      if (!state_[entry].watched) continue;
      for (Py_ssize_t i = 0; PyDict_Next(value, &i, &inner_key, &inner); ++next) {
        if (next >= values_.size() || values_[next].object != inner) return false;
        if (values_[next].data != nullptr && data_of(inner) != values_[next].data) return false;
      }
    }
    if (next != values_.size()) return false;
    for (const Parameter& p : parameters_) {
      const c10::TensorImpl* impl = unpack(p.object).unsafeGetTensorImpl();
      if (impl->data() != p.data || unpack(p.object).scalar_type() != p.dtype ||
          impl->device() != p.device || impl->sizes() != c10::IntArrayRef(p.sizes) ||
          impl->strides() != c10::IntArrayRef(p.strides)) {
        return false;
      }
    }
    return true;
  }

  // Whether everything is as the plan has it; reads the hyper-parameters unless they are
  // `prepared`.
  bool begin(const py::dict& own,
             const std::optional<LossScale>& scale,
             int64_t micro_batches,
             bool prepared) {
    static PyObject *const groups = name("param_groups"), *const state = name("state");
    PyObject* const param_groups = get(own.ptr(), groups);
    if (!unchanged(param_groups, get(own.ptr(), state))) return false;
    if (prepared) return true;
    std::optional<c10::Device> device;
    for (const Launch& launch : launches_) {
      const c10::Device d = launch.counters.device();
      if (device && *device != d) {
        device.reset();
        break;
      }
      device = d;
    }
    hyper_.read(param_groups, device);
    const bool clips = hyper_.read_control(own, scale, micro_batches, averages_);
    if (clips != clips_) ++generation_;
    clips_ = clips;
    return true;
  }

  // Fills each launch's slots from the parameters that have a gradient.
  int gather() {
    for (PyObject* p : frozen_) {
      if (unpack(p).unsafeGetTensorImpl()->grad().defined()) return kOutdated;
    }
    clear_slots();
    unsupported_.clear();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& p = parameters_[i];
      const at::Tensor& param = unpack(p.object);
      const at::Tensor& grad = param.unsafeGetTensorImpl()->grad();
      if (p.launch != kFitsNoLaunch) {
        launches_[p.launch].slots[p.slot] = {address_of(param), nullptr, p.row, 0};
      }
      if (!grad.defined()) continue;
      if (!supported(param, grad, p.low.defined())) {
        unsupported_.push_back(static_cast<int64_t>(i));
        continue;
      }
      if (p.launch == kFitsNoLaunch || lacks_state(p)) return kOutdated;
      Launch& launch = launches_[p.launch];
      Slot& slot = launch.slots[p.slot];
      slot.flags = flags_of(p, grad.scalar_type());
      launch.active = true;
      if (!grad.is_neg() && same_layout(param, grad)) {
        slot.grad = address_of(grad);
      } else {
        const at::AutoDispatchBelowADInplaceOrView guard;
        at::Tensor copy = at::empty_strided(param.sizes(), param.strides(), grad.options());
        copy.copy_(grad);
        slot.grad = address_of(copy);
        launch.copies.emplace_back(grad, std::move(copy));
      }
    }
    return unsupported_.empty() ? kDone : kUnsupported;
  }

  // The same from the sums in the packed planes.
  int gather_accumulated() {
    clear_slots();
    for (const Parameter& p : parameters_) {
      if (p.launch == kFitsNoLaunch) continue;
      Launch& launch = launches_[p.launch];
      const at::Tensor& param = unpack(p.object);
      Slot& slot = launch.slots[p.slot];
      slot = {address_of(param), nullptr, p.row, 0};
      if (!p.accumulated) continue;
      if (lacks_state(p)) return kOutdated;
      slot.grad = address_of(packed_slice(p));
      slot.flags = flags_of(p, p.dtype);
      launch.active = true;
    }
    return kDone;
  }

  // Averages go on without a gradient.
  void clear_slots() {
    for (Launch& launch : launches_) {
      launch.active = averages_;
      launch.copies.clear();
    }
  }

  static int32_t flags_of(const Parameter& p, at::ScalarType grad) {
    int32_t flags = 0;
    if (grad != p.dtype) flags |= grad == at::kHalf ? kHalfGrad : kBFloat16Grad;
    if (p.low.defined()) flags |= p.low.scalar_type() == at::kHalf ? kWritesHalf : kWritesBFloat16;
    return flags;
  }

  // A 16-bit gradient of a float32 parameter is one of mixed precision's, or torch's business.
  static bool supported(const at::Tensor& param, const at::Tensor& grad, bool has_low) {
    const at::ScalarType type = grad.scalar_type();
    const bool narrow = type == at::kHalf || type == at::kBFloat16;
    return grad.layout() == at::kStrided &&
           (type == param.scalar_type() ||
            (narrow && has_low && param.scalar_type() == at::kFloat)) &&
           grad.device() == param.device() && grad.sizes() == param.sizes() &&
           !grad.key_set().has_any(c10::python_ks);
  }

  at::Tensor packed_slice(const Parameter& p) const {
    const at::Tensor& plane = launches_[p.launch].packed[p.segment];
    return plane.as_strided(p.sizes, p.strides, plane.storage_offset() + p.offset);
  }

  // The gradients become slices of the packed planes; unscaled ones go back to .grad.
  void use_packed() {
    for (Launch& launch : launches_) launch.copies.clear();
    for (const Parameter& p : parameters_) {
      if (!takes_part(p)) continue;
      Launch& launch = launches_[p.launch];
      const at::Tensor slice = packed_slice(p);
      launch.copies.emplace_back(unpack(p.object).grad(), slice);
      Slot& slot = launch.slots[p.slot];
      slot.grad = address_of(slice);
      slot.flags &= ~(kHalfGrad | kBFloat16Grad);
    }
  }

  const Rule rule_;
  HyperRows hyper_;
  std::vector<py::object> held_;
  std::vector<std::vector<PyObject*>> groups_;
  std::vector<PyObject*> frozen_;  // held by held_, as members of groups_
  std::vector<Parameter> parameters_;
  std::vector<Entry> state_;
  std::vector<StateValue> values_;
  std::vector<Launch> launches_;
  std::vector<at::Tensor> tables_;
  bool averages_ = false, clips_ = false;
  at::Tensor chain_;
  std::vector<const void*> fingerprint_;
  int64_t generation_ = 0;
  std::vector<int64_t> unsupported_;
};

}  // namespace torch_renaissance
