// SPDX-License-Identifier: BSD-3-Clause
// Layer normalisation of float32 rows, to which a branch of 16-bit numbers may be added first, with
// a 16-bit result: a transformer's residual stream under autocast. Plain C++.
#pragma once

#include <cstdint>

namespace torch_renaissance {

// `sum = input + round(branch + branch_bias)`, `output = norm(sum)`.
struct LayerNorm {
  int64_t rows;
  int channels;  // a multiple of kLayerNormVector
  bool bfloat16;
  const float* input;
  const void *branch, *branch_bias;  // both or the first, or neither
  float* sum;                        // with a branch
  void* output;
  const float *weight, *bias;
  float *mean, *rstd;  // [rows]
  float eps;
};

struct LayerNormBackward {
  int64_t rows;
  int channels;
  bool bfloat16;
  const void* grad;       // of the output
  const float* grad_sum;  // of the sum, whoever else reads it; or null
  const float* sum;       // what was normalised
  const float *weight, *mean, *rstd;
  float* grad_input;
  void* grad_branch;  // grad_input in 16 bits; or null
  float *grad_weight, *grad_bias;
  void* grad_branch_bias;  // sums of grad_branch; or null
};

inline constexpr int kLayerNormVector = 4;
inline constexpr int kMostLayerNormChannels = 1024;  // that registers of a warp hold

}  // namespace torch_renaissance
