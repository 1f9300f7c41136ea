// SPDX-License-Identifier: BSD-3-Clause
// A matrix [rows, channels] of 16-bit numbers: sums of its columns, GELU of it plus a bias, and
// what attention takes from one. Plain C++.
#pragma once

#include <cstdint>

namespace torch_renaissance {

struct Columns {
  int64_t rows;
  int channels;  // a multiple of kNormVector
  bool bfloat16;
  bool tanh;          // which form of GELU
  const void* input;  // of GELU, or to be added up
  const void* bias;   // of each channel, is added to the input
  const void* grad;   // backward: of GELU's output
  void* output;       // forward: GELU; backward: the gradient of the input
  void* sums;         // [channels], of the input's columns, or backward of the output's
  bool float_sums;    // else they are rounded to 16 bits
};

// Queries, keys and values (or their gradients), each [batch, heads, length, size], become a matrix
// [batch * length, 3 * heads * size].
struct Heads {
  int batch, heads, length, size;  // `size` a multiple of kNormVector
  bool bfloat16;
  const void* parts[3];
  // Of each part: of a batch, a head and a position. Numbers are side by side.
  int64_t strides[3][3];
  void* packed;
  void* sums;  // of packed's columns
};

}  // namespace torch_renaissance
