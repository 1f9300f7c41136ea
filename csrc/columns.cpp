// SPDX-License-Identifier: BSD-3-Clause
// The ops on columns, with which TrainStep replaces parts of what torch.compile compiles, and what
// a compiler needs to know of them. A GPU alone has kernels for them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace torch_renaissance {
namespace {

at::Tensor column_sums_meta(const at::Tensor& matrix, std::optional<at::ScalarType> dtype) {
  return at::empty_symint({matrix.sym_size(1)},
                          matrix.options().dtype(dtype.value_or(matrix.scalar_type())));
}

at::Tensor bias_gelu_meta(const at::Tensor& input, const at::Tensor& bias, bool tanh) {
  return at::empty_like(input);
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward_meta(const at::Tensor& grad,
                                                           const at::Tensor& input,
                                                           const at::Tensor& bias,
                                                           bool tanh) {
  return {at::empty_like(input), at::empty_like(bias)};
}

std::tuple<at::Tensor, at::Tensor> pack_heads_meta(const at::Tensor& q,
                                                   const at::Tensor& k,
                                                   const at::Tensor& v) {
  const auto channels = q.sym_size(1) * q.sym_size(3) * 3;
  return {q.new_empty_symint({q.sym_size(0), q.sym_size(2), channels}),
          q.new_empty_symint({channels})};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def("column_sums(Tensor matrix, *, ScalarType? dtype=None) -> Tensor");
  m.def("pack_heads(Tensor q, Tensor k, Tensor v) -> (Tensor packed, Tensor sums)");
  m.def("bias_gelu(Tensor input, Tensor bias, bool tanh) -> Tensor");
  m.def(
      "bias_gelu_backward(Tensor grad, Tensor input, Tensor bias, bool tanh) -> "
      "(Tensor grad_input, Tensor grad_bias)");
}

TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("column_sums", column_sums_meta);
  m.impl("pack_heads", pack_heads_meta);
  m.impl("bias_gelu", bias_gelu_meta);
  m.impl("bias_gelu_backward", bias_gelu_backward_meta);
}

}  // namespace torch_renaissance
