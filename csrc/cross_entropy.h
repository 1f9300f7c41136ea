// SPDX-License-Identifier: BSD-3-Clause
// What a cross entropy computes on, and the functions of each device that do it.
// Plain C++, for host and device, without torch's headers.
#pragma once

#include <cstdint>

#include "update.h"

namespace at {
class Tensor;
}

namespace torch_renaissance {

enum class Reduction { kNone, kMean, kSum };  // torch's numbers

// Strides of logits (N, C, d1, ...), in elements; all d are one dimension of positions. A row is
// one (sample, position): its classes are a stride apart.
struct LogitStrides {
  int64_t sample, position, n_class;
};

// T below is the dtype of the arithmetic: float, or double for double.
struct CrossEntropy {
  ScalarType dtype;     // of the logits and their gradient
  bool wide_loss;       // the loss and its gradient are T, not of the logits' dtype
  bool asserts_labels;  // on a GPU: a label out of bounds fails an assertion, instead of a NaN
  Reduction reduction;
  int64_t n_rows, n_positions, n_classes;  // N * d1 * ..., d1 * ..., C
  const void* input;
  LogitStrides input_strides;
  const int64_t* target;  // [n_rows]
  const void* weight;     // T [n_classes], may be null
  int64_t ignore_index;
  double target_share, uniform_share;
  // T [n_rows + 1, 2], what backward needs of forward: each row's largest logit and the logarithm
  // of its sum of e^(x - max); at the end the mean's divisor and the sum of all class weights.
  void* saved;
  void* loss;  // [n_rows] if nothing is reduced, else [1]; forward only
  // Backward only:
  const void* grad_loss;  // a row's is grad_loss_stride after the last's
  int64_t grad_loss_stride;
  void* grad;  // of the logits
  LogitStrides grad_strides;
};

struct CrossEntropyBackend {
  void (*forward)(const CrossEntropy&, const at::Tensor& like) = nullptr;
  void (*backward)(const CrossEntropy&, const at::Tensor& like) = nullptr;
  bool (*can_wait)() = nullptr;  // whether the host may wait for the device's work now
};

inline CrossEntropyBackend cpu_cross_entropy, cuda_cross_entropy;

}  // namespace torch_renaissance
