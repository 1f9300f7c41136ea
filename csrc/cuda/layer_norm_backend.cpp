// SPDX-License-Identifier: BSD-3-Clause
// The ops of layer norm on a GPU.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "../autocast_rules.h"
#include "layer_norm.h"

namespace torch_renaissance {
namespace {

// Checks that `t` is contiguous and of this dtype and shape, on the device of `like`. Returns it as
// the kernels read it.
at::Tensor fitting(const char* name,
                   const at::Tensor& t,
                   at::ScalarType dtype,
                   at::IntArrayRef shape,
                   const at::Tensor& like) {
  TORCH_CHECK(t.scalar_type() == dtype && t.sizes() == shape && t.is_contiguous() &&
                  t.device() == like.device(),
              "layer_norm: ",
              name,
              " must be a contiguous ",
              dtype,
              " tensor of shape ",
              shape,
              ", got ",
              t.scalar_type(),
              " of shape ",
              t.sizes(),
              " with strides ",
              t.strides());
  return aligned(t);
}

// Of float32 rows, whose result or gradient is `halves`.
template <typename Norm>
Norm rows_of(const at::Tensor& input, at::ScalarType halves) {
  const int64_t channels = input.dim() == 0 ? 0 : input.size(-1);
  TORCH_CHECK(channels > 0 && channels % kLayerNormVector == 0 &&
                  channels <= kMostLayerNormChannels && input.numel() > 0,
              "layer_norm: takes rows of a multiple of ",
              kLayerNormVector,
              " numbers, at most ",
              kMostLayerNormChannels,
              ", got shape ",
              input.sizes());
  TORCH_CHECK(halves == at::kHalf || halves == at::kBFloat16,
              "layer_norm: the output is float16 or bfloat16, got ",
              halves);
  Norm n{};
  n.channels = static_cast<int>(channels);
  n.rows = input.numel() / channels;
  n.bfloat16 = halves == at::kBFloat16;
  return n;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_forward(
    const at::Tensor& input,
    const std::optional<at::Tensor>& branch,
    const std::optional<at::Tensor>& branch_bias,
    const at::Tensor& weight,
    const at::Tensor& bias,
    double eps,
    at::ScalarType dtype) {
  auto n = rows_of<LayerNorm>(input, dtype);
  const at::Tensor x = fitting("input", input, at::kFloat, input.sizes(), input);
  const at::Tensor w = fitting("weight", weight, at::kFloat, {n.channels}, input);
  const at::Tensor b = fitting("bias", bias, at::kFloat, weight.sizes(), input);
  TORCH_CHECK(branch.has_value() || !branch_bias.has_value(),
              "layer_norm_forward: branch_bias needs a branch");
  at::Tensor more, more_bias;
  if (branch.has_value()) {
    more = fitting("branch", *branch, dtype, input.sizes(), input);
    n.branch = more.const_data_ptr();
  }
  if (branch_bias.has_value()) {
    more_bias = fitting("branch_bias", *branch_bias, dtype, weight.sizes(), input);
    n.branch_bias = more_bias.const_data_ptr();
  }
  const c10::cuda::CUDAGuard guard(input.device());
  at::Tensor output = at::empty_like(input, input.options().dtype(dtype));
  at::Tensor sum = branch.has_value() ? at::empty_like(input) : input.new_empty({0});
  at::Tensor mean = input.new_empty({n.rows}), rstd = at::empty_like(mean);
  n.input = x.const_data_ptr<float>();
  n.weight = w.const_data_ptr<float>();
  n.bias = b.const_data_ptr<float>();
  n.sum = sum.mutable_data_ptr<float>();
  n.output = output.mutable_data_ptr();
  n.mean = mean.mutable_data_ptr<float>();
  n.rstd = rstd.mutable_data_ptr<float>();
  n.eps = static_cast<float>(eps);
  C10_CUDA_CHECK(layer_norm_cuda(n, c10::cuda::getCurrentCUDAStream()));
  return {output, sum, mean, rstd};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> layer_norm_backward(
    const at::Tensor& grad,
    const std::optional<at::Tensor>& grad_sum,
    const at::Tensor& sum,
    const at::Tensor& weight,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    bool has_branch,
    bool has_branch_bias) {
  auto n = rows_of<LayerNormBackward>(sum, grad.scalar_type());
  const at::Tensor x = fitting("sum", sum, at::kFloat, sum.sizes(), sum);
  const at::Tensor w = fitting("weight", weight, at::kFloat, {n.channels}, sum);
  const at::Tensor g = fitting("grad", grad, grad.scalar_type(), sum.sizes(), sum);
  const at::Tensor means = fitting("mean", mean, at::kFloat, {n.rows}, sum);
  const at::Tensor rstds = fitting("rstd", rstd, at::kFloat, {n.rows}, sum);
  TORCH_CHECK(has_branch || !has_branch_bias, "layer_norm_backward: branch_bias needs a branch");
  at::Tensor rest;
  if (grad_sum.has_value()) {
    rest = fitting("grad_sum", *grad_sum, at::kFloat, sum.sizes(), sum);
    n.grad_sum = rest.const_data_ptr<float>();
  }
  const c10::cuda::CUDAGuard guard(sum.device());
  const auto halves = grad.options();
  const at::Tensor none = grad.new_empty({0});
  at::Tensor grad_input = at::empty_like(sum);
  at::Tensor grad_branch = has_branch ? at::empty_like(sum, halves) : none;
  at::Tensor grad_weight = at::empty_like(weight), grad_bias = at::empty_like(weight);
  at::Tensor of_branch_bias = has_branch_bias ? at::empty_like(weight, halves) : none.clone();
  n.grad = g.const_data_ptr();
  n.sum = x.const_data_ptr<float>();
  n.weight = w.const_data_ptr<float>();
  n.mean = means.const_data_ptr<float>();
  n.rstd = rstds.const_data_ptr<float>();
  n.grad_input = grad_input.mutable_data_ptr<float>();
  n.grad_weight = grad_weight.mutable_data_ptr<float>();
  n.grad_bias = grad_bias.mutable_data_ptr<float>();
  if (has_branch) n.grad_branch = grad_branch.mutable_data_ptr();
  if (has_branch_bias) n.grad_branch_bias = of_branch_bias.mutable_data_ptr();
  const int blocks = layer_norm_blocks(n.rows);
  at::Tensor partials = sum.new_empty({int64_t{blocks} * kLayerNormSums * n.channels});
  C10_CUDA_CHECK(layer_norm_backward_cuda(
      n, blocks, partials.mutable_data_ptr<float>(), c10::cuda::getCurrentCUDAStream()));
  return {grad_input, grad_branch, grad_weight, grad_bias, of_branch_bias};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) {
  m.impl("layer_norm_forward", layer_norm_forward);
  m.impl("layer_norm_backward", layer_norm_backward);
}

}  // namespace torch_renaissance
