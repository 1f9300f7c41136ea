// SPDX-License-Identifier: BSD-3-Clause
// optimizer.step() on the host: check that nothing moved, gather gradients, refresh the table of
// hyper-parameters where a value changed, one launch a device and dtype (two with clipping or a
// loss scale if the model is large, three under LARS). A call costs microseconds.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "host_gradients.h"

namespace torch_renaissance {

class HostStep : public HostGradients {
 public:
  // Where run() finds gradients: in .grad; there, packed meanwhile; or only in the packed planes.
  enum Source { kGather, kPacked, kAccumulated };

  explicit HostStep(const std::string& rule)
      : HostGradients(rule == "adam"   ? Rule::kAdam
                      : rule == "lars" ? Rule::kLars
                                       : Rule::kSgd) {}

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

  // Where the last norm of the gradients is; None before the first.
  py::object chain() const {
    if (!chain_.defined()) return py::none();
    return wrap(chain_);
  }

  int64_t ema_calls() const { return hyper_.ema_calls; }

  void set_ema_calls(int64_t calls) { hyper_.ema_calls = calls; }

 private:
  static int64_t version_of(const Parameter& p) {
    return unpack(p.object).unsafeGetTensorImpl()->version_counter().current_version();
  }

  // A copy that was fresh before the kernels wrote both is fresh after it.
  static void bump(Parameter& p) {
    const bool fresh = p.low.defined() && p.low_version == version_of(p);
    unpack(p.object).unsafeGetTensorImpl()->bump_version();
    if (fresh) p.low_version = version_of(p);
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
    hyper_.refuse_overflow(param_groups, narrow_);
    const bool clips = hyper_.read_control(own, scale, micro_batches, averages_);
    if (clips != clips_) ++generation_;
    clips_ = clips;
    return true;
  }

  bool clips_ = false;
  at::Tensor chain_;
};

}  // namespace torch_renaissance
