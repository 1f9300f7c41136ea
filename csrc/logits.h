// SPDX-License-Identifier: BSD-3-Clause
// What the cross entropy's ops and its autograd both say of their tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

namespace torch_renaissance {

using OptionalTensor = std::optional<at::Tensor>;
using ForwardResult = std::tuple<at::Tensor, at::Tensor>;

inline at::ScalarType arithmetic_dtype(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// While there is one, a label out of bounds on a GPU ends the program as in torch's kernels; else
// the loss is NaN. Seen by this thread's calls of forward.
struct AssertLabels {
  AssertLabels() { ++count; }
  ~AssertLabels() { --count; }
  AssertLabels(const AssertLabels&) = delete;
  AssertLabels& operator=(const AssertLabels&) = delete;
  static inline thread_local int count = 0;
};

inline int64_t class_dim(const at::Tensor& input) { return input.dim() == 1 ? 0 : 1; }

}  // namespace torch_renaissance
