// SPDX-License-Identifier: BSD-3-Clause
// Layer normalisation (arXiv:1607.06450), as torch.nn.functional.layer_norm defines it, and its
// gradient: of one number of a row.
#pragma once

#include <cmath>

#include "host_device.h"

namespace torch_renaissance {

struct NormaliseRow {
  float mean, rstd;

  // `squares` is the sum of squared distances from the mean.
  static TR_HOST_DEVICE NormaliseRow of(float mean, float squares, float n, float eps) {
    return {mean, 1.0f / std::sqrt(squares / n + eps)};
  }
  TR_HOST_DEVICE float normal(float x) const { return (x - mean) * rstd; }
  TR_HOST_DEVICE float operator()(float x, float weight, float bias) const {
    return std::fma(normal(x), weight, bias);
  }
  // The gradient of x. `along` is the mean over the row of grad * weight * normal(x), `mean_grad`
  // that of grad * weight.
  TR_HOST_DEVICE float gradient(float weighted_grad,
                                float normal,
                                float mean_grad,
                                float along) const {
    return std::fma(-normal, along, weighted_grad - mean_grad) * rstd;
  }
};

}  // namespace torch_renaissance
