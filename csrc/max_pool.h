// SPDX-License-Identifier: BSD-3-Clause
// What max pooling over channels_last tensors of a 16-bit dtype computes on.
// Plain C++, for host and device, without torch's headers.
#pragma once

#include <cstdint>

#include "update.h"

namespace torch_renaissance {

// Channels that a thread works on: 16 bytes of values, 8 of positions.
inline constexpr int kPoolChannels = 8;
// Positions in a window are bytes; this one stands for none.
inline constexpr int kNoPosition = 255;

struct MaxPool {
  ScalarType dtype;  // of all values: kHalf or kBFloat16
  int n_samples, n_channels;
  int size[2], pooled[2];  // rows and columns of the input and of the output, as below
  int kernel[2], stride[2], padding[2];
  // [samples, pooled rows, pooled columns, channels]: where in its window a maximum was,
  // row * kernel[1] + column. In forward it may be null.
  uint8_t* positions;
  // Forward: [samples, rows, columns, channels] of the input to that of the output.
  const void* input;
  void* output;
  // Backward, from the output's to the input's.
  const void* grad_output;
  void* grad_input;
};

// As torch counts: with ceil_mode also one that is cut off, if it begins before the input's end.
inline int64_t count_windows(int64_t size, int kernel, int stride, int padding, bool ceil_mode) {
  const int64_t room = size + 2 * padding - kernel + (ceil_mode ? stride - 1 : 0);
  if (room < 0) return 0;
  const int64_t windows = room / stride + 1;
  return ceil_mode && (windows - 1) * stride >= size + padding ? windows - 1 : windows;
}

}  // namespace torch_renaissance
