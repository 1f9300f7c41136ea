// SPDX-License-Identifier: BSD-3-Clause
// torch.lerp, which is exact at both ends: it starts from the nearer one.
#pragma once

#include <cmath>

#include "host_device.h"

namespace torch_renaissance {

// `late`: weight >= 0.5.
template <typename T>
TR_HOST_DEVICE T lerp(T from, T to, T weight, bool late) {
  const T gap = to - from;
  const T early = std::fma(weight, gap, from);
  return late ? std::fma(weight - T(1), gap, to) : early;
}

}  // namespace torch_renaissance
