// SPDX-License-Identifier: BSD-3-Clause
// The ops of layer norm in a residual stream, which TrainStep puts in the place of torch's in what
// torch.compile compiles, and what a compiler needs to know of them. A GPU alone has kernels.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace torch_renaissance {
namespace {

using Four = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using Five = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Four layer_norm_forward_meta(const at::Tensor& input,
                             const std::optional<at::Tensor>& branch,
                             const std::optional<at::Tensor>& branch_bias,
                             const at::Tensor& weight,
                             const at::Tensor& bias,
                             double eps,
                             at::ScalarType dtype) {
  const auto rows = input.sym_numel() / input.sym_size(-1);
  const at::Tensor mean = input.new_empty_symint({rows});
  return {at::empty_like(input, input.options().dtype(dtype)),
          branch.has_value() ? at::empty_like(input) : input.new_empty({0}),
          mean,
          at::empty_like(mean)};
}

Five layer_norm_backward_meta(const at::Tensor& grad,
                              const std::optional<at::Tensor>& grad_sum,
                              const at::Tensor& sum,
                              const at::Tensor& weight,
                              const at::Tensor& mean,
                              const at::Tensor& rstd,
                              bool has_branch,
                              bool has_branch_bias) {
  const auto halves = grad.options();
  const at::Tensor none = grad.new_empty({0});
  return {at::empty_like(sum),
          has_branch ? at::empty_like(sum, halves) : none,
          at::empty_like(weight),
          at::empty_like(weight),
          has_branch_bias ? at::empty_like(weight, halves) : none.clone()};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def(
      "layer_norm_forward(Tensor input, Tensor? branch, Tensor? branch_bias, Tensor weight, "
      "Tensor bias, float eps, ScalarType dtype) -> "
      "(Tensor output, Tensor sum, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor grad, Tensor? grad_sum, Tensor sum, Tensor weight, Tensor mean, "
      "Tensor rstd, bool has_branch, bool has_branch_bias) -> (Tensor grad_input, "
      "Tensor grad_branch, Tensor grad_weight, Tensor grad_bias, Tensor grad_branch_bias)");
}

TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("layer_norm_forward", layer_norm_forward_meta);
  m.impl("layer_norm_backward", layer_norm_backward_meta);
}

}  // namespace torch_renaissance
