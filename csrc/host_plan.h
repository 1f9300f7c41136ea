// SPDX-License-Identifier: BSD-3-Clause
// What optimizer.step() on the host starts from: parameters, state and launches as they were when
// the plan was made, and whether they still are.
#pragma once

#include <algorithm>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

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

class HostPlan {
 public:
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
    const std::vector<py::object> until_the_end = forget();
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
    narrow_.assign(groups_.size(), false);
    for (const Parameter& p : parameters_) {
      narrow_[p.group] = narrow_[p.group] || p.dtype != at::kDouble;
    }
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

  // Whether everything is where the plan has it.
  bool fits(const py::dict& own) const {
    static PyObject *const groups = name("param_groups"), *const state = name("state");
    return unchanged(get(own.ptr(), groups), get(own.ptr(), state));
  }

  // For the garbage collector: a hook that a parameter holds may lead back to the optimizer.
  int traverse(visitproc visit, void* arg) const {
    for (const py::object& o : held_) Py_VISIT(o.ptr());
    return 0;
  }
  void release() { forget(); }

  // Changes when work captured before would write to the wrong places or leave something out.
  int64_t generation() const { return generation_; }

 protected:
  explicit HostPlan(Rule rule) : rule_(rule), hyper_(rule) {}

  bool unchanged(PyObject* param_groups, PyObject* state) const {
    if (!PyList_Check(param_groups) || !PyDict_Check(state)) return false;
    if (static_cast<Py_ssize_t>(groups_.size()) != PyList_GET_SIZE(param_groups)) return false;
    static PyObject* const params = name("params");
    for (size_t g = 0; g < groups_.size(); ++g) {
      PyObject* list = PyDict_GetItem(PyList_GET_ITEM(param_groups, g), params);
      if (list == nullptr || !(PyList_Check(list) || PyTuple_Check(list))) return false;
      if (PySequence_Fast_GET_SIZE(list) != static_cast<Py_ssize_t>(groups_[g].size())) {
        return false;
      }
      for (size_t i = 0; i < groups_[g].size(); ++i) {
        if (PySequence_Fast_GET_ITEM(list, i) != groups_[g][i]) return false;
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

  const Rule rule_;
  HyperRows hyper_;
  std::vector<std::vector<PyObject*>> groups_;
  std::vector<PyObject*> frozen_;  // held by held_, as members of groups_
  std::vector<bool> narrow_;       // by group: whether it is computed in float32
  std::vector<Parameter> parameters_;
  std::vector<Launch> launches_;
  std::vector<at::Tensor> tables_;
  bool averages_ = false;
  int64_t generation_ = 0;

 private:
  // Empties itself first: letting go of what is returned may run Python code that asks this object.
  std::vector<py::object> forget() {
    groups_.clear();
    parameters_.clear();
    state_.clear();
    values_.clear();
    launches_.clear();
    tables_.clear();
    frozen_.clear();
    averages_ = false;
    hyper_.forget();
    return std::exchange(held_, {});
  }

  void hold(PyObject* o) { held_.push_back(py::reinterpret_borrow<py::object>(o)); }
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

  std::vector<py::object> held_;
  std::vector<Entry> state_;
  std::vector<StateValue> values_;
  std::vector<const void*> fingerprint_;
};

}  // namespace torch_renaissance
