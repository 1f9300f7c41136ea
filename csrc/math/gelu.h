// SPDX-License-Identifier: BSD-3-Clause
// GELU (arXiv:1606.08415) and its derivative, as torch.nn.functional.gelu defines both forms, for
// results that are rounded to 16 bits.
#pragma once

#include <cmath>

#include "host_device.h"

namespace torch_renaissance {

struct Gelu {
  float value, derivative;
};

TR_HOST_DEVICE float quick_exp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

TR_HOST_DEVICE float quick_reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1.0f / x;
#endif
}

// x times the share of the normal distribution below x. The share above |x| is exp(-x^2 / 2) times
// a polynomial in 1 / (1 + 0.35 |x|), fitted to a relative error of 4e-7.
TR_HOST_DEVICE Gelu gelu(float x) {
  const float t = quick_reciprocal(std::fma(0.35f, std::fabs(x), 1.0f));
  const float bell = quick_exp2(x * x * -0.72134752f);  // log2(e) / 2
  float above = std::fma(t, 0.04661062f, -0.19252882f);
  above = std::fma(t, above, 0.22425902f);
  above = std::fma(t, above, -0.00199036f);
  above = std::fma(t, above, 0.14797265f);
  above = std::fma(t, above, 0.13580964f);
  above = std::fma(t, above, 0.13986707f) * t * bell;
  const float below = x > 0 ? 1.0f - above : above;
  return {x * below, std::fma(x * 0.39894228f, bell, below)};  // 1 / sqrt(2 pi)
}

// By tanh. exp(-2 u) is infinite for a large -u, and the sigmoid of 2 u then 0, as it should be.
TR_HOST_DEVICE Gelu gelu_tanh(float x) {
  constexpr float kScale = 0.79788456f, kCubic = 0.044715f;  // sqrt(2 / pi)
  const float square = x * x;
  const float u = kScale * x * std::fma(kCubic, square, 1.0f);
  const float below = quick_reciprocal(1.0f + quick_exp2(u * -2.8853901f));  // 2 log2(e)
  const float slope = kScale * std::fma(3 * kCubic, square, 1.0f);
  return {x * below, std::fma(x * 2 * below * (1.0f - below), slope, below)};
}

}  // namespace torch_renaissance
