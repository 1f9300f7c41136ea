// SPDX-License-Identifier: BSD-3-Clause
// Adam (https://arxiv.org/abs/1412.6980), AdamW (https://arxiv.org/abs/1711.05101) and AMSGrad
// (https://openreview.net/forum?id=ryQu7f-RZ). Order of operations, and where a multiply and an add
// round once (fma), are those of torch's for-loop form.
#pragma once

#include <cmath>

#include "hyper.h"
#include "lerp.h"

namespace torch_renaissance {

struct AdamRule {
  static constexpr int kPlanes = 3;  // exp_avg, exp_avg_sq, max_exp_avg_sq

  // The part that needs exp: the same for every block of a tensor.
  struct Correction {
    double correction1;       // 1 - beta1^step
    double correction2_sqrt;  // sqrt(1 - beta2^step)
  };

  // `step` counts this update, so it is at least 1.
  static TR_HOST_DEVICE Correction correction(const Hyper& h, double step) {
    return {1.0 - std::exp(step * h.log_beta1), std::sqrt(1.0 - std::exp(step * h.log_beta2))};
  }

  // What is the same for every element of a tensor, rounded once from double.
  template <typename T>
  struct Scalars {
    T decay, weight1, beta2, weight2, step_size, correction2_sqrt, eps;
    T sign, coupled_decay;
    bool coupled, late_lerp, amsgrad, plain;
  };

  template <typename T>
  static TR_HOST_DEVICE Scalars<T> scalars(const Hyper& h, const Correction& c) {
    Scalars<T> s;
    s.decay = h.decoupled ? static_cast<T>(1.0 - h.lr * h.weight_decay) : T(1);
    s.weight1 = static_cast<T>(1.0 - h.beta1);
    s.beta2 = static_cast<T>(h.beta2);
    s.weight2 = static_cast<T>(1.0 - h.beta2);
    s.step_size = static_cast<T>(h.lr / c.correction1);
    s.correction2_sqrt = as_divisor(static_cast<T>(c.correction2_sqrt));
    s.eps = static_cast<T>(h.eps);
    s.sign = h.maximize ? T(-1) : T(1);
    s.coupled_decay = static_cast<T>(h.weight_decay);
    s.coupled = h.weight_decay != 0 && !h.decoupled;
    s.late_lerp = !(s.weight1 < T(0.5));
    s.amsgrad = h.amsgrad;
    s.plain = !h.maximize && !s.coupled && !s.late_lerp && !s.amsgrad;
    return s;
  }

  // Every update advances the step counter.
  static TR_HOST_DEVICE bool counts(const Hyper&) { return true; }

  // PLAIN promises s.plain: the usual case needs half of the scalars in registers.
  template <bool PLAIN, typename T>
  static TR_HOST_DEVICE T update(const Scalars<T>& s, T param, T grad, T* state) {
    T g = PLAIN ? grad : grad * s.sign;
    param = param * s.decay;
    if (!PLAIN) g = s.coupled ? std::fma(s.coupled_decay, param, g) : g;
    state[0] = lerp(state[0], g, s.weight1, !PLAIN && s.late_lerp);
    state[1] = std::fma(s.weight2 * g, g, state[1] * s.beta2);
    T second = state[1];
    if (!PLAIN) {
      // NaN wins, as in torch.maximum.
      const T larger = state[2] > second || state[2] != state[2] ? state[2] : second;
      state[2] = s.amsgrad ? larger : state[2];
      second = s.amsgrad ? larger : second;
    }
    const T denom = divide(root(second), s.correction2_sqrt) + s.eps;
    return subtract_quotient(param, s.step_size, state[0], denom);
  }
};

}  // namespace torch_renaissance
