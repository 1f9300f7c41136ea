// SPDX-License-Identifier: BSD-3-Clause
// The ops of max pooling on a GPU.
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <tuple>

#include "../autocast_rules.h"
#include "max_pool_calls.h"

namespace torch_renaissance {
namespace {

std::tuple<at::Tensor, at::Tensor> max_pool2d_forward(const at::Tensor& input,
                                                      at::IntArrayRef kernel_size,
                                                      at::IntArrayRef stride,
                                                      at::IntArrayRef padding,
                                                      bool ceil_mode) {
  const at::Tensor x = aligned(input);
  MaxPool p{};
  TORCH_CHECK(describe_pool(x, kernel_size, stride, padding, 1, ceil_mode, p),
              "max_pool2d_forward: takes float16 or bfloat16 in channels_last, channels a multiple "
              "of ",
              kPoolChannels,
              ", and windows of at most ",
              kNoPosition,
              " numbers; got ",
              input.scalar_type(),
              " of shape ",
              input.sizes(),
              " with strides ",
              input.strides(),
              ", kernel_size ",
              kernel_size,
              ", stride ",
              stride,
              " and padding ",
              padding);
  const c10::cuda::CUDAGuard guard(x.device());
  const std::array<int64_t, 4> sizes{p.n_samples, p.n_channels, p.pooled[0], p.pooled[1]};
  at::Tensor output = empty_pooled(sizes, x, x.scalar_type());
  at::Tensor positions = empty_pooled(sizes, x, at::kByte);
  p.input = x.const_data_ptr();
  p.output = output.mutable_data_ptr();
  p.positions = positions.mutable_data_ptr<uint8_t>();
  C10_CUDA_CHECK(max_pool_forward_cuda(p, c10::cuda::getCurrentCUDAStream()));
  return {output, positions};
}

at::Tensor max_pool2d_backward(const at::Tensor& grad,
                               const at::Tensor& positions,
                               at::IntArrayRef size,
                               at::IntArrayRef kernel_size,
                               at::IntArrayRef stride,
                               at::IntArrayRef padding) {
  const c10::cuda::CUDAGuard guard(grad.device());
  TORCH_CHECK(grad.sizes() == positions.sizes() && grad.device() == positions.device() &&
                  positions.scalar_type() == at::kByte && positions.is_contiguous(kPoolFormat),
              "max_pool2d_backward: grad must have the shape of positions, ",
              positions.sizes(),
              ", which forward has made, got ",
              grad.sizes());
  const at::Tensor rows = aligned(grad.contiguous(kPoolFormat)), from = aligned(positions);
  at::Tensor found =
      empty_pooled({grad.size(0), grad.size(1), size[0], size[1]}, grad, grad.scalar_type());
  MaxPool p{};
  const bool taken = describe_pool(found, kernel_size, stride, padding, 1, true, p);
  for (int d : {0, 1}) p.pooled[d] = static_cast<int>(grad.size(2 + d));  // ceil_mode may add one
  TORCH_CHECK(taken,
              "max_pool2d_backward: forward takes no ",
              grad.scalar_type(),
              " of shape ",
              found.sizes());
  p.grad_output = rows.const_data_ptr();
  p.grad_input = found.mutable_data_ptr();
  p.positions = const_cast<uint8_t*>(from.const_data_ptr<uint8_t>());  // read alone
  C10_CUDA_CHECK(max_pool_backward_cuda(p, c10::cuda::getCurrentCUDAStream()));
  return found;
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) {
  m.impl("max_pool2d_forward", max_pool2d_forward);
  m.impl("max_pool2d_backward", max_pool2d_backward);
}

}  // namespace torch_renaissance
