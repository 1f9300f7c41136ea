// SPDX-License-Identifier: BSD-3-Clause
// Batch normalisation of a matrix [rows, channels] of 16-bit numbers, which is what a channels_last
// tensor is in memory, by the statistics of the batch. Plain C++.
#pragma once

#include <cstdint>

namespace torch_renaissance {

// Forward, and what may follow in place: `output = relu(norm(input) + residual)`. Or, where there
// is a `sum`, `output = norm(input)` and `sum = relu(output + sum)`.
struct BatchNorm {
  int64_t rows;
  int channels;  // a multiple of kNormVector
  bool bfloat16;
  bool relu;
  void* input;
  const void* input_bias;  // or null: of each channel, is added to the input first, in its place
  // Or null: of each channel, isn't in the input, which only the running mean would show.
  const void* absent_bias;
  const void* residual;  // or null
  void* output;
  void* sum;  // or null; `residual` is the same then
  const float *weight, *bias;
  float *mean, *invstd;               // [channels], of the batch
  float *running_mean, *running_var;  // or null
  float momentum, eps;
};

// How backward knows where ReLU let the gradient pass.
enum class NormMask : int32_t { kNone, kOfOutput, kOfResult };

struct BatchNormBackward {
  int64_t rows;
  int channels;
  bool bfloat16;
  // kOfOutput: ReLU's input is computed again. kOfResult: with a residual, from ReLU's result.
  NormMask mask;
  const void* input;
  const void* grad;
  const void* more_grad;  // for kOfResult: is added to `grad`; or null
  const void* result;     // for kOfResult
  void* grad_residual;    // for kOfResult: what ReLU let pass of `grad`
  void* grad_input;
  const float *weight, *bias, *mean, *invstd;
  float *grad_weight, *grad_bias;
  // Or null. With an `input_bias` in forward, its gradient: the sum of grad_input, as it is
  // written.
  void* grad_input_bias;
};

// Channels that a thread works on. With more, what it has to remember of each of them would leave
// no registers for rows on their way.
inline constexpr int kNormVector = 4;
inline constexpr int kMostNormChannels = 4096;
inline constexpr int kMostNormRows = 1 << 30;

}  // namespace torch_renaissance
