// SPDX-License-Identifier: BSD-3-Clause
// Batch normalisation (arXiv:1502.03167), as torch.nn.functional.batch_norm defines it, and its
// gradient: of one number, and of a channel's statistics.
#pragma once

#include <cmath>

#include "host_device.h"

namespace torch_renaissance {

// The mean of some numbers, and the sum of their squared distances from it.
struct Moments {
  float mean, squares;

  // From sums of x - shift and of its square, where the shift is one of the numbers: what cancels
  // is their spread, not their distance from zero.
  static TR_HOST_DEVICE Moments of(float shift, float sum, float sum_of_squares, float n) {
    const float squares = sum_of_squares - sum * (sum / n);
    return {shift + sum / n, squares < 0 ? 0.0f : squares};  // a NaN stays
  }
};

// Adds up the moments of groups, by their distances from the mean of one of them.
struct MomentsOfGroups {
  float sum = 0, squares = 0;

  TR_HOST_DEVICE void add(const Moments& group, float n, float shift) {
    const float distance = group.mean - shift;
    sum = std::fma(n, distance, sum);
    squares += std::fma(n * distance, distance, group.squares);
  }
  TR_HOST_DEVICE void add(const MomentsOfGroups& other) {
    sum += other.sum;
    squares += other.squares;
  }
  TR_HOST_DEVICE Moments total(float shift, float n) const {
    return Moments::of(shift, sum, squares, n);
  }
};

TR_HOST_DEVICE float inverse_std(const Moments& m, float n, float eps) {
  return 1.0f / std::sqrt(m.squares / n + eps);
}

TR_HOST_DEVICE float running(float before, float now, float momentum) {
  return std::fma(momentum, now, (1.0f - momentum) * before);
}

// One channel's numbers become fma(x - mean, scale, bias).
struct Normalise {
  float mean, scale, bias;

  TR_HOST_DEVICE float operator()(float x) const { return std::fma(x - mean, scale, bias); }
};

// The gradient of x: what is left of grad without its mean and without its part along x.
struct NormaliseBackward {
  float mean, scale, mean_grad, along;

  // grad_bias is the sum of grad, grad_weight that of grad * (x - mean) * invstd.
  static TR_HOST_DEVICE NormaliseBackward
  of(float mean, float invstd, float weight, float grad_weight, float grad_bias, float n) {
    return {mean, weight * invstd, grad_bias / n, grad_weight * invstd / n};
  }
  TR_HOST_DEVICE float operator()(float x, float grad) const {
    return std::fma(mean - x, along, grad - mean_grad) * scale;
  }
};

}  // namespace torch_renaissance
