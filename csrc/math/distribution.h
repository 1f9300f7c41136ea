// SPDX-License-Identifier: BSD-3-Clause
// Random values as a function of 64 random bits. Computed in double for every dtype, so that a
// narrower one holds the same value, rounded.
#pragma once

#include "normal.h"
#include "philox.h"

namespace torch_renaissance {

enum class Distribution { kUniform, kNormal, kTruncNormal };

// Uniform: from a to b. Normal: mean a, standard deviation b; truncated, it is cut off at a ± 2b
// (which makes its standard deviation 0.8796 b).
TR_HOST_DEVICE double draw(Distribution distribution, double a, double b, uint64_t bits) {
  if (distribution == Distribution::kUniform) {
    const double x = a + (b - a) * uniform_double(bits);
    return x < b ? x : b;  // where b - a was rounded up
  }
  const double q = uniform_centred(bits);
  if (distribution == Distribution::kNormal) return a + b * normal_quantile(q);
  const double within = 0.95449973610364158560;  // P(-2 < Z < 2)
  const double z = normal_quantile(within * q);
  return a + b * (z < -2.0 ? -2.0 : z > 2.0 ? 2.0 : z);
}

}  // namespace torch_renaissance
