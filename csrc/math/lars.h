// SPDX-License-Identifier: BSD-3-Clause
// LARS (https://arxiv.org/abs/1708.03888): SGD whose step is scaled, tensor by tensor, to the size
// of the weight. Bias-like tensors (no kTrust, no decay in their row) take plain SGD's steps.
#pragma once

#include <cmath>

#include "hyper.h"

namespace torch_renaissance {

struct LarsRule {
  static constexpr int kPlanes = 1;  // momentum_buffer, which starts at zero
  static constexpr double kLeastNorm = 1e-12;

  struct Correction {
    double ratio;
  };

  // `weight_norm`, `grad_norm`: of the tensor and its gradient as the update will see it. A tensor
  // of zeros would never leave zero, and one without a gradient has no direction: both get 1.
  static TR_HOST_DEVICE Correction correction(const Hyper& h,
                                              double weight_norm,
                                              double grad_norm) {
    if (!h.trust || weight_norm < kLeastNorm || grad_norm < kLeastNorm) return {1.0};
    const double trust_coefficient = h.beta2, max_trust_ratio = h.log_beta1;
    const double ratio =
        trust_coefficient * weight_norm / (grad_norm + h.weight_decay * weight_norm + h.eps);
    return {ratio > max_trust_ratio ? max_trust_ratio : ratio};  // NaN stays
  }

  template <typename T>
  struct Scalars {
    T momentum, coupled_decay, reach, weight, lr, sign;
    bool coupled, has_momentum, nesterov, plain;
  };

  template <typename T>
  static TR_HOST_DEVICE Scalars<T> scalars(const Hyper& h, const Correction& c) {
    // The weight of a huge gradient may be too small for a normal fp32, though their product isn't:
    // a power of two then goes ahead of it.
    const double weight = h.lr_in_velocity ? h.lr * c.ratio : c.ratio;
    const double reach = weight < 1e-30 ? 0x1p-64 : 1.0;
    Scalars<T> s;
    s.momentum = static_cast<T>(h.beta1);
    s.coupled_decay = static_cast<T>(h.weight_decay);
    s.reach = static_cast<T>(reach);
    s.weight = static_cast<T>(weight / reach);
    s.lr = h.lr_in_velocity ? T(1) : static_cast<T>(h.lr);
    s.sign = h.maximize ? T(-1) : T(1);
    s.coupled = h.weight_decay != 0;
    s.has_momentum = h.beta1 != 0;
    s.nesterov = h.nesterov;
    s.plain = !h.maximize && s.has_momentum;
    return s;
  }

  static TR_HOST_DEVICE bool counts(const Hyper& h) { return h.beta1 != 0; }

  // PLAIN promises s.plain.
  template <bool PLAIN, typename T>
  static TR_HOST_DEVICE T update(const Scalars<T>& s, T param, T grad, T* state) {
    T g = PLAIN ? grad : grad * s.sign;
    g = (s.coupled ? std::fma(s.coupled_decay, param, g) : g) * s.reach;
    if (!PLAIN && !s.has_momentum) return std::fma(-s.lr, s.weight * g, param);
    state[0] = std::fma(s.weight, g, state[0] * s.momentum);
    const T ahead = s.nesterov ? std::fma(s.weight, g, state[0] * s.momentum) : state[0];
    return std::fma(-s.lr, ahead, param);
  }
};

}  // namespace torch_renaissance
