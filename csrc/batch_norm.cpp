// SPDX-License-Identifier: BSD-3-Clause
// The ops of batch norm, which TrainStep puts in the place of torch's in what torch.compile
// compiles, and what a compiler needs to know of them. A GPU alone has kernels for them.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

namespace torch_renaissance {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_forward_meta(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const OptionalTensor& residual,
    const OptionalTensor& absent_bias,
    const OptionalTensor& running_mean,
    const OptionalTensor& running_var,
    double momentum,
    double eps,
    bool relu) {
  return {at::empty_like(input), at::empty_like(weight), at::empty_like(weight)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward_meta(
    const at::Tensor& grad,
    const OptionalTensor& more_grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const at::Tensor& mean,
    const at::Tensor& invstd,
    const OptionalTensor& result,
    bool relu,
    bool has_absent_bias) {
  const at::Tensor none = input.new_empty({0});
  return {at::empty_like(input),
          at::empty_like(weight),
          at::empty_like(bias),
          result.has_value() ? at::empty_like(input) : none,
          has_absent_bias ? at::empty_like(bias, input.options()) : none.clone()};
}

// The counters of all batch norms of a model, by one kernel.
void count_batches_(at::TensorList counters) { at::_foreach_add_(counters, 1); }

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def(
      "batch_norm_forward(Tensor input, Tensor weight, Tensor bias, Tensor? residual, "
      "Tensor? absent_bias, Tensor(a!)? running_mean, Tensor(b!)? running_var, float momentum, "
      "float eps, bool relu) -> (Tensor output, Tensor mean, Tensor invstd)");
  m.def(
      "batch_norm_backward(Tensor grad, Tensor? more_grad, Tensor input, Tensor weight, "
      "Tensor bias, Tensor mean, Tensor invstd, Tensor? result, bool relu, bool has_absent_bias) "
      "-> (Tensor grad_input, Tensor grad_weight, Tensor grad_bias, Tensor grad_residual, "
      "Tensor grad_absent_bias)");
  m.def("count_batches_(Tensor(a!)[] counters) -> ()");
}

TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("batch_norm_forward", batch_norm_forward_meta);
  m.impl("batch_norm_backward", batch_norm_backward_meta);
}

TORCH_LIBRARY_IMPL(torch_renaissance, CompositeExplicitAutograd, m) {
  m.impl("count_batches_", count_batches_);
}

}  // namespace torch_renaissance
