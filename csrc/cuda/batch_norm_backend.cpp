// SPDX-License-Identifier: BSD-3-Clause
// The ops of batch norm on a GPU.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/sum.h>
#include <torch/library.h>

#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "../autocast_rules.h"
#include "batch_norm_node.h"

namespace torch_renaissance {
namespace {

// The gradient as the kernels read it.
at::Tensor like_input(const at::Tensor& grad, const at::Tensor& input) {
  TORCH_CHECK(grad.sizes() == input.sizes() && grad.device() == input.device(),
              "batch_norm_backward: grad must have input's shape ",
              input.sizes(),
              ", got ",
              grad.sizes());
  return aligned(grad.to(input.scalar_type()).contiguous(format_of_rows(input)));
}

// A tensor that must be like input, as the kernels read it.
at::Tensor rows_like(const char* name, const at::Tensor& t, const at::Tensor& input) {
  TORCH_CHECK(t.sizes() == input.sizes() && t.is_contiguous(format_of_rows(input)) &&
                  t.scalar_type() == input.scalar_type() && t.device() == input.device(),
              "batch_norm: ",
              name,
              " must be like input, got ",
              t.scalar_type(),
              " of shape ",
              t.sizes(),
              " with strides ",
              t.strides());
  return aligned(t);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm_forward(
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const std::optional<at::Tensor>& residual,
    const std::optional<at::Tensor>& absent_bias,
    const std::optional<at::Tensor>& running_mean,
    const std::optional<at::Tensor>& running_var,
    double momentum,
    double eps,
    bool relu) {
  const at::Tensor x = aligned(input);
  TORCH_CHECK(takes_norm(x, weight, bias, running_mean, running_var, true),
              "batch_norm_forward: takes float16 or bfloat16 with channels last in memory, a "
              "multiple of ",
              kNormVector,
              " and at most ",
              kMostNormChannels,
              ", and float32 vectors of a number for each; got ",
              input.scalar_type(),
              " of shape ",
              input.sizes(),
              " with strides ",
              input.strides());
  at::Tensor output = at::empty_like(input);
  at::Tensor mean = at::empty_like(weight), invstd = at::empty_like(weight);
  BatchNorm n{};
  at::Tensor added;
  if (residual.has_value()) {
    added = rows_like("residual", *residual, input);
    n.residual = added.const_data_ptr();
  }
  if (absent_bias.has_value()) {
    TORCH_CHECK(absent_bias->is_contiguous() && absent_bias->sizes() == weight.sizes() &&
                    absent_bias->scalar_type() == input.scalar_type() &&
                    absent_bias->device() == input.device(),
                "batch_norm_forward: absent_bias must be of weight's shape and input's dtype, got ",
                absent_bias->scalar_type(),
                " of shape ",
                absent_bias->sizes());
    n.absent_bias = absent_bias->const_data_ptr();
  }
  n.input = const_cast<void*>(x.const_data_ptr());  // written to for an input_bias alone
  n.output = output.mutable_data_ptr();
  n.relu = relu;
  n.weight = weight.const_data_ptr<float>();
  n.bias = bias.const_data_ptr<float>();
  n.mean = mean.mutable_data_ptr<float>();
  n.invstd = invstd.mutable_data_ptr<float>();
  if (running_mean.has_value()) {
    n.running_mean = running_mean->mutable_data_ptr<float>();
    n.running_var = running_var->mutable_data_ptr<float>();
  }
  n.momentum = static_cast<float>(momentum);
  n.eps = static_cast<float>(eps);
  launch_batch_norm(n, x);
  return {output, mean, invstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> batch_norm_backward(
    const at::Tensor& grad,
    const std::optional<at::Tensor>& more_grad,
    const at::Tensor& input,
    const at::Tensor& weight,
    const at::Tensor& bias,
    const at::Tensor& mean,
    const at::Tensor& invstd,
    const std::optional<at::Tensor>& result,
    bool relu,
    bool has_absent_bias) {
  const at::Tensor x = aligned(input);
  TORCH_CHECK(takes_norm(x, weight, bias, mean, invstd, true),
              "batch_norm_backward: input must be what batch_norm_forward takes");
  TORCH_CHECK(!more_grad.has_value() || result.has_value(),
              "batch_norm_backward: more_grad needs a result");
  const at::Tensor rows = like_input(grad, input), none = input.new_empty({0});
  const at::Tensor more = more_grad.has_value() ? like_input(*more_grad, input) : none;
  at::Tensor grad_input = at::empty_like(input), grad_residual = none, passed_by;
  at::Tensor grad_weight = at::empty_like(weight), grad_bias = at::empty_like(bias);
  BatchNormBackward n{};
  n.mask = result.has_value() ? NormMask::kOfResult : relu ? NormMask::kOfOutput : NormMask::kNone;
  n.grad = rows.const_data_ptr();
  n.more_grad = more_grad.has_value() ? more.const_data_ptr() : nullptr;
  if (result.has_value()) {
    passed_by = rows_like("result", *result, input);
    grad_residual = at::empty_like(input);
    n.result = passed_by.const_data_ptr();
    n.grad_residual = grad_residual.mutable_data_ptr();
  }
  n.grad_input = grad_input.mutable_data_ptr();
  n.grad_weight = grad_weight.mutable_data_ptr<float>();
  n.grad_bias = grad_bias.mutable_data_ptr<float>();
  n.input = x.const_data_ptr();
  n.weight = weight.const_data_ptr<float>();
  n.bias = bias.const_data_ptr<float>();
  n.mean = mean.const_data_ptr<float>();
  n.invstd = invstd.const_data_ptr<float>();
  at::Tensor absent = none.clone();
  launch_batch_norm_backward(n, x, has_absent_bias ? &absent : nullptr);
  if (has_absent_bias && n.grad_input_bias == nullptr) {
    std::vector<int64_t> dims(input.dim());
    std::iota(dims.begin(), dims.end(), 0);
    dims.erase(dims.begin() + 1);
    absent = at::sum(grad_input, dims);
  }
  return {grad_input, grad_weight, grad_bias, grad_residual, absent};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) {
  m.impl("batch_norm_forward", batch_norm_forward);
  m.impl("batch_norm_backward", batch_norm_backward);
}

}  // namespace torch_renaissance
