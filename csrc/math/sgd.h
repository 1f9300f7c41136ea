// SPDX-License-Identifier: BSD-3-Clause
// SGD with momentum, dampening and Nesterov's look-ahead, as torch.optim.SGD defines them
// (its momentum buffer starts as the first gradient), and the decoupled decay of arXiv:1711.05101.
#pragma once

#include <cmath>

#include "hyper.h"

namespace torch_renaissance {

struct SgdRule {
  static constexpr int kPlanes = 1;  // momentum_buffer

  template <typename T>
  struct Scalars {
    T decay, momentum, gradient_weight, lr;
    T sign, coupled_decay;
    bool coupled, has_momentum, first, nesterov, plain;
  };

  struct Correction {
    double
        step;  // counts updates with momentum, this one included: at 1 the buffer is the gradient
  };

  static TR_HOST_DEVICE Correction correction(const Hyper&, double step) { return {step}; }

  template <typename T>
  static TR_HOST_DEVICE Scalars<T> scalars(const Hyper& h, const Correction& c) {
    Scalars<T> s;
    s.sign = h.maximize ? T(-1) : T(1);
    s.coupled = h.weight_decay != 0 && !h.decoupled;
    s.coupled_decay = static_cast<T>(h.weight_decay);
    s.decay = h.decoupled ? static_cast<T>(1.0 - h.lr * h.weight_decay) : T(1);
    s.momentum = static_cast<T>(h.beta1);
    s.gradient_weight = static_cast<T>(1.0 - h.beta2);
    s.lr = static_cast<T>(h.lr);
    s.has_momentum = h.beta1 != 0;
    s.first = c.step <= 1;
    s.nesterov = h.nesterov;
    s.plain = !h.maximize && !s.coupled && !s.first && s.has_momentum;
    return s;
  }

  static TR_HOST_DEVICE bool counts(const Hyper& h) { return h.beta1 != 0; }

  // PLAIN promises s.plain.
  template <bool PLAIN, typename T>
  static TR_HOST_DEVICE T update(const Scalars<T>& s, T param, T grad, T* state) {
    T g = PLAIN ? grad : grad * s.sign;
    param = param * s.decay;
    if (!PLAIN) g = s.coupled ? std::fma(s.coupled_decay, param, g) : g;
    const T running = std::fma(s.gradient_weight, g, state[0] * s.momentum);
    const T buffer = !PLAIN && s.first ? g : running;
    const T ahead = s.nesterov ? std::fma(s.momentum, buffer, g) : buffer;
    state[0] = PLAIN || s.has_momentum ? buffer : state[0];
    return std::fma(-s.lr, PLAIN || s.has_momentum ? ahead : g, param);
  }
};

}  // namespace torch_renaissance
