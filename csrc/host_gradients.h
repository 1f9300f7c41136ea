// SPDX-License-Identifier: BSD-3-Clause
// Gradients on the host: from .grad into the launches' slots, into the packed planes, and from
// those.
#pragma once

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <vector>

#include "backend.h"
#include "host_plan.h"

namespace torch_renaissance {

class HostGradients : public HostPlan {
 public:
  // What run() and its like answer. Unless kDone, nothing has been changed.
  enum Answer { kDone, kOutdated, kUnsupported, kHasGradients, kHasHooks };

  // Makes sums of gradients start from zero.
  void begin_accumulation() {
    for (Launch& launch : launches_) {
      for (at::Tensor& plane : launch.packed) plane.zero_();
    }
    for (Parameter& p : parameters_) p.accumulated = false;
  }

  // Which parameters the last launches had a gradient of, and a replay's way to say that the sums
  // have one of them.
  std::vector<bool> taking_part() const {
    std::vector<bool> found;
    for (const Parameter& p : parameters_) found.push_back(takes_part(p));
    return found;
  }
  // Of which parameters the sums have a gradient.
  std::vector<bool> accumulated() const {
    std::vector<bool> found;
    for (const Parameter& p : parameters_) found.push_back(p.accumulated);
    return found;
  }
  void add_accumulated(const std::vector<bool>& found) {
    for (size_t i = 0; i < found.size() && i < parameters_.size(); ++i) {
      parameters_[i].accumulated = parameters_[i].accumulated || found[i];
    }
  }

  // How many updates the last step launched.
  int64_t launched() const {
    return std::count_if(
        launches_.begin(), launches_.end(), [](const Launch& l) { return l.active; });
  }

  // After kUnsupported: which entries have a gradient that the kernels don't take.
  std::vector<int64_t> unsupported() const { return unsupported_; }

 protected:
  using HostPlan::HostPlan;

  bool takes_part(const Parameter& p) const {
    return p.launch != kFitsNoLaunch && launches_[p.launch].slots[p.slot].grad != nullptr;
  }

  bool lacks_state(const Parameter& p) const {
    const int needed = hyper_.planes_needed[p.group];
    return p.planes < needed || (needed > 0 && !p.has_state);
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

 private:
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

  std::vector<int64_t> unsupported_;
};

}  // namespace torch_renaissance
