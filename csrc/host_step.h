// SPDX-License-Identifier: BSD-3-Clause
// optimizer.step() on the host: check that nothing moved, gather gradients, refresh the table of
// hyper-parameters where a value changed, one launch a device and dtype. A call costs microseconds.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <unordered_set>
#include <vector>

#include "backend.h"
#include "checks.h"
#include "math/hyper.h"
#include "update.h"

namespace torch_renaissance {
namespace py = pybind11;

inline constexpr int kFitsNoLaunch = -1;

inline PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

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
  int segment;     // within the launch
  int64_t offset;  // within the segment's planes
};

// One op's worth of work: what sgd_ or adam_ would be told, kept from step to step.
struct Launch {
  std::vector<at::Tensor> held;  // planes, steps and chunks, whose addresses `update` has
  std::vector<at::Tensor> packed;
  at::Tensor counters, hyper;
  Update update;
  std::vector<Slot> slots;
  bool active;                                            // some slot has a gradient
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;  // (.grad, its copy in the right layout)
};

inline const at::Tensor& unpack(PyObject* object) { return THPVariable_Unpack(object); }

inline bool is_tensor(PyObject* object) { return THPVariable_Check(object); }

class HostStep {
 public:
  // What run() and pack() answer. Unless kDone, nothing has been changed.
  enum Answer { kDone, kOutdated, kUnsupported };

  explicit HostStep(const std::string& rule) : adam_(rule == "adam") {}

  // Takes a plan over: groups as lists of parameters, the optimizer's state, what each parameter
  // is (`entries`), those that have no slot unless they get a gradient (`frozen`), and the
  // launches. Holds all objects, so that an identity is never reused.
  void set_plan(const py::list& groups,
                const py::dict& state,
                const py::list& entries,
                const py::list& frozen,
                const py::list& launches) {
    groups_.clear();
    parameters_.clear();
    state_.clear();
    values_.clear();
    launches_.clear();
    hyper_.clear();
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
    for (const auto& entry : entries) add_parameter(py::cast<py::tuple>(entry));
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
  }

  // One step of the optimizer whose attributes are `own`.
  int run(const py::dict& own, bool from_packed) {
    static PyObject *const grad_scale = name("grad_scale"), *const found_inf = name("found_inf");
    const int answer = gather(own);
    if (answer != kDone) return answer;
    const auto scale = scalar(own, grad_scale), inf = scalar(own, found_inf);
    if (from_packed) use_packed();
    set_hyper();
    bool counts_skips = true;
    for (Launch& launch : launches_) {
      if (!launch.active) continue;
      const auto on_device = [&](const std::optional<at::Tensor>& t) {
        // To the CPU it must block: the value is read at once.
        const bool non_blocking = launch.counters.is_cuda();
        return t ? t->to(launch.counters.device(), at::kFloat, non_blocking) : at::Tensor();
      };
      const at::Tensor s = on_device(scale), i = on_device(inf);
      launch.update.grad_scale = s.defined() ? s.const_data_ptr<float>() : nullptr;
      launch.update.found_inf = i.defined() ? i.const_data_ptr<float>() : nullptr;
      launch.update.counts_skips = counts_skips;
      counts_skips = false;
      {
        std::optional<py::gil_scoped_release> release;
        if (launch.counters.is_cpu()) release.emplace();
        backend_of(launch.counters).update(launch.update, launch.counters);
      }
      if (s.defined()) {
        const at::AutoDispatchBelowADInplaceOrView guard;
        for (auto& [grad, copy] : launch.copies) grad.copy_(copy);
      }
    }
    // While the device works: autograd must see that the parameters changed in place.
    for (const Parameter& p : parameters_) {
      if (p.launch == kFitsNoLaunch || launches_[p.launch].slots[p.slot].grad == nullptr) continue;
      const at::Tensor& param = unpack(p.object);
      param.unsafeGetTensorImpl()->bump_version();
      if (scale) param.unsafeGetTensorImpl()->grad().unsafeGetTensorImpl()->bump_version();
    }
    for (Launch& launch : launches_) launch.copies.clear();
    return kDone;
  }

  // Copies the gradients into each launch's packed planes.
  int pack(const py::dict& own) {
    const int answer = gather(own);
    if (answer != kDone) return answer;
    for (Launch& launch : launches_) {
      Pack p{launch.update.dtype,
             launch.slots.data(),
             launch.update.n_slots,
             {},
             launch.update.n_segments};
      for (int i = 0; i < p.n_segments; ++i) {
        p.segments[i] = launch.update.segments[i];
        p.segments[i].planes[0] = launch.packed[i].data_ptr();
      }
      backend_of(launch.counters).pack(p, launch.counters);
      launch.copies.clear();
    }
    return kDone;
  }

  // How many launches the last step took.
  int64_t launched() const {
    return std::count_if(
        launches_.begin(), launches_.end(), [](const Launch& l) { return l.active; });
  }

  // After kUnsupported: which entries have a gradient that the kernels don't take.
  std::vector<int64_t> unsupported() const { return unsupported_; }

 private:
  void hold(PyObject* o) { held_.push_back(py::reinterpret_borrow<py::object>(o)); }

  static const void* data_of(PyObject* tensor) {
    const at::Tensor& t = unpack(tensor);
    return t.has_storage() ? t.unsafeGetTensorImpl()->data() : nullptr;
  }

  static std::optional<at::Tensor> scalar(const py::dict& own, PyObject* key) {
    PyObject* o = PyDict_GetItem(own.ptr(), key);
    if (o == nullptr || o == Py_None) return std::nullopt;
    if (!is_tensor(o) || unpack(o).numel() != 1) {
      throw py::type_error("optimizer." + py::str(key).cast<std::string>() +
                           " must be a tensor of one element, got " +
                           py::repr(o).cast<std::string>());
    }
    return unpack(o);
  }

  void add_launch(const py::dict& from) {
    Launch launch{};
    launch.counters = unpack(py::object(from["counters"]).ptr());
    launch.hyper = unpack(py::object(from["hyper"]).ptr());
    Update& u = launch.update;
    u.rule = adam_ ? Rule::kAdam : Rule::kSgd;
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
      to.steps = keep(segment["steps"]).data_ptr<float>();
      to.n_slots = static_cast<int32_t>(launch.held.back().numel());
      u.dtype = scalar_type("step", keep(segment["like"]));
      const at::Tensor& chunks = keep(segment["chunks"]);
      to.chunks = reinterpret_cast<const Chunk*>(chunks.const_data_ptr());
      to.n_chunks = chunks.size(0);
      to.first_slot = static_cast<int32_t>(u.n_slots);
      u.n_slots += to.n_slots;
      if (!segment["packed"].is_none()) launch.packed.push_back(unpack(segment["packed"].ptr()));
    }
    launch.slots.assign(u.n_slots, Slot{nullptr, nullptr, 0});
    launches_.push_back(std::move(launch));
    // A vector's memory stays where it is when the vector is moved.
    launches_.back().update.slots = launches_.back().slots.data();
  }

  void add_parameter(const py::tuple& entry) {
    PyObject* object = py::object(entry[0]).ptr();
    const at::Tensor& t = unpack(object);
    const int group = entry[1].cast<int>();
    const bool decays = entry[2].cast<bool>();
    parameters_.push_back({object,
                           data_of(object),
                           t.scalar_type(),
                           t.device(),
                           c10::DimVector(t.sizes()),
                           c10::DimVector(t.strides()),
                           group,
                           2 * group + (decays ? 0 : 1),
                           entry[3].cast<int>(),
                           entry[4].cast<int64_t>(),
                           entry[5].cast<int>(),
                           entry[6].cast<bool>(),
                           entry[7].cast<int>(),
                           entry[8].cast<int64_t>()});
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
    return next == values_.size();
  }

  // Fills each launch's slots from the parameters that have a gradient, and rows_ from the groups.
  int gather(const py::dict& own) {
    static PyObject *const groups = name("param_groups"), *const state = name("state");
    PyObject* const param_groups = get(own.ptr(), groups);
    if (!unchanged(param_groups, get(own.ptr(), state))) return kOutdated;
    for (PyObject* p : frozen_) {
      if (unpack(p).unsafeGetTensorImpl()->grad().defined()) return kOutdated;
    }
    read_rows(param_groups);
    for (Launch& launch : launches_) {
      launch.active = false;
      launch.copies.clear();
    }
    unsupported_.clear();
    for (size_t i = 0; i < parameters_.size(); ++i) {
      const Parameter& p = parameters_[i];
      const at::Tensor& param = unpack(p.object);
      const c10::TensorImpl* impl = param.unsafeGetTensorImpl();
      if (impl->data() != p.data || param.scalar_type() != p.dtype || impl->device() != p.device ||
          impl->sizes() != c10::IntArrayRef(p.sizes) ||
          impl->strides() != c10::IntArrayRef(p.strides)) {
        return kOutdated;
      }
      const at::Tensor& grad = impl->grad();
      if (!grad.defined()) {
        if (p.launch != kFitsNoLaunch) launches_[p.launch].slots[p.slot].grad = nullptr;
        continue;
      }
      if (!supported(param, grad)) {
        unsupported_.push_back(static_cast<int64_t>(i));
        continue;
      }
      if (p.launch == kFitsNoLaunch || p.planes < planes_needed_[p.group] ||
          (planes_needed_[p.group] > 0 && !p.has_state)) {
        return kOutdated;
      }
      Launch& launch = launches_[p.launch];
      Slot& slot = launch.slots[p.slot];
      slot = {address_of(param), nullptr, p.row};
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

  static bool supported(const at::Tensor& param, const at::Tensor& grad) {
    return grad.layout() == at::kStrided && grad.scalar_type() == param.scalar_type() &&
           grad.device() == param.device() && grad.sizes() == param.sizes() &&
           !grad.key_set().has_any(c10::python_ks);
  }

  static double number(PyObject* o) {
    if (PyFloat_Check(o)) return PyFloat_AS_DOUBLE(o);
    if (is_tensor(o)) return unpack(o).item().toDouble();
    const double value = PyFloat_AsDouble(o);
    if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
    return value;
  }

  static bool truth(PyObject* group, PyObject* key, bool otherwise) {
    PyObject* o = PyDict_GetItem(group, key);
    return o == nullptr ? otherwise : PyObject_IsTrue(o) == 1;
  }

  static PyObject* get(PyObject* group, PyObject* key) {
    PyObject* o = PyDict_GetItemWithError(group, key);
    if (o == nullptr) {
      if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
      throw py::error_already_set();
    }
    return o;
  }

  // A CUDA scalar is read by the kernel, so that nothing waits for it here.
  bool read_on_device(PyObject* lr) const {
    if (!is_tensor(lr) || !unpack(lr).is_cuda()) return false;
    const at::Tensor& t = unpack(lr);
    if (t.scalar_type() != at::kFloat && t.scalar_type() != at::kDouble) return false;
    for (const Launch& launch : launches_) {
      if (launch.counters.device() != t.device()) return false;
    }
    return true;
  }

  void read_rows(PyObject* param_groups) {
    static PyObject *const lr = name("lr"), *const weight_decay = name("weight_decay"),
                           *const momentum = name("momentum"), *const dampening = name("dampening"),
                           *const nesterov = name("nesterov"), *const betas = name("betas"),
                           *const eps = name("eps"), *const amsgrad = name("amsgrad"),
                           *const maximize = name("maximize"),
                           *const decoupled = name("decoupled_weight_decay");
    rows_.assign(2 * groups_.size() * kHyperColumns, 0.0);
    planes_needed_.assign(groups_.size(), 0);
    for (size_t g = 0; g < groups_.size(); ++g) {
      PyObject* group = PyList_GET_ITEM(param_groups, g);
      double* row = rows_.data() + 2 * g * kHyperColumns;
      PyObject* rate = get(group, lr);
      if (read_on_device(rate)) {
        row[kLrPointer] =
            static_cast<double>(reinterpret_cast<uintptr_t>(unpack(rate).const_data_ptr()));
        row[kLrIsDouble] = unpack(rate).scalar_type() == at::kDouble;
      } else {
        row[kLr] = number(rate);
      }
      row[kWeightDecay] = number(get(group, weight_decay));
      int flags = 0;
      flags |= truth(group, maximize, false) ? kMaximize : 0;
      flags |= truth(group, decoupled, false) ? kDecoupled : 0;
      if (adam_) {
        const py::object pair = py::reinterpret_borrow<py::object>(get(group, betas));
        row[kBeta1] = number(py::object(pair[py::int_(0)]).ptr());
        row[kBeta2] = number(py::object(pair[py::int_(1)]).ptr());
        row[kLogBeta1] = std::log(row[kBeta1]);
        row[kLogBeta2] = std::log(row[kBeta2]);
        row[kEps] = number(get(group, eps));
        flags |= truth(group, amsgrad, false) ? kAmsgrad : 0;
        planes_needed_[g] = (flags & kAmsgrad) != 0 ? 3 : 2;
      } else {
        row[kBeta1] = number(get(group, momentum));
        row[kBeta2] = number(get(group, dampening));
        flags |= truth(group, nesterov, false) ? kNesterov : 0;
        planes_needed_[g] = row[kBeta1] != 0 ? 1 : 0;
      }
      row[kFlags] = flags;
      std::copy(row, row + kHyperColumns, row + kHyperColumns);
      row[kHyperColumns + kWeightDecay] = 0;
    }
  }

  // The values travel as kernel arguments, so the next step may change them at once. A copy made
  // inside a capture hasn't happened yet: what the table holds is then not known.
  void set_hyper() {
    if (rows_ == hyper_) return;
    bool captured = false;
    for (size_t i = 0; i < launches_.size(); ++i) {
      const at::Tensor& hyper = launches_[i].hyper;
      captured = captured || backend_of(hyper).is_capturing();
      bool done = false;
      for (size_t j = 0; j < i; ++j) done = done || launches_[j].hyper.is_same(hyper);
      if (!done) backend_of(hyper).write(hyper.data_ptr<double>(), rows_, hyper);
    }
    hyper_ = rows_;
    if (captured) hyper_.clear();
  }

  // The gradients become slices of the packed planes; unscaled ones go back to .grad.
  void use_packed() {
    for (Launch& launch : launches_) launch.copies.clear();
    for (const Parameter& p : parameters_) {
      if (p.launch == kFitsNoLaunch || launches_[p.launch].slots[p.slot].grad == nullptr) continue;
      Launch& launch = launches_[p.launch];
      const at::Tensor& plane = launch.packed[p.segment];
      const at::Tensor slice =
          plane.as_strided(p.sizes, p.strides, plane.storage_offset() + p.offset);
      launch.copies.emplace_back(unpack(p.object).grad(), slice);
      launch.slots[p.slot].grad = address_of(slice);
    }
  }

  const bool adam_;
  std::vector<py::object> held_;
  std::vector<std::vector<PyObject*>> groups_;
  std::vector<PyObject*> frozen_;  // held by held_, as members of groups_
  std::vector<Parameter> parameters_;
  std::vector<Entry> state_;
  std::vector<StateValue> values_;
  std::vector<Launch> launches_;
  std::vector<double> rows_, hyper_;
  std::vector<int> planes_needed_;
  std::vector<int64_t> unsupported_;
};

}  // namespace torch_renaissance
