// SPDX-License-Identifier: BSD-3-Clause
// Adds a number to each channel of a matrix [rows, channels] of 16-bit numbers. Plain C++.
#pragma once

#include <cstdint>

namespace torch_renaissance {

struct ChannelBias {
  int64_t rows;  // 0 where something else does it
  int channels;  // a multiple of kBiasVector
  bool bfloat16;
  void* matrix;
  const void* bias;
};

inline constexpr int kBiasVector = 8;  // channels that a thread works on: 16 bytes

}  // namespace torch_renaissance
