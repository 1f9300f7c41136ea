// SPDX-License-Identifier: BSD-3-Clause
// Max pooling in the place of torch's: which calls are taken, and their autograd. Forward leaves a
// byte for each value, where torch leaves eight and keeps the input.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/max_pool2d_ops.h>
#include <ATen/ops/max_pool2d_with_indices_backward.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <limits>
#include <mutex>
#include <string>

#include "../autocast_rules.h"
#include "../autograd_node.h"
#include "max_pool_calls.h"

namespace torch_renaissance {

at::Tensor empty_pooled(at::IntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype) {
  return at::empty(sizes, like.options().dtype(dtype), kPoolFormat);
}

namespace {

// -- Autograd ------------------------------------------------------------------------------------

class MaxPoolBackward : public torch::autograd::Node {
 public:
  using Tensors = torch::autograd::variable_list;

  void save(const MaxPool& p, bool ceil_mode, const at::Tensor& positions) {
    pool_ = p;
    ceil_mode_ = ceil_mode;
    positions_ = torch::autograd::SavedVariable(positions, /*is_output=*/false);
  }

  std::string name() const override { return "torch_renaissance::MaxPoolBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    positions_.reset_data();
  }

 protected:
  Tensors apply(Tensors&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!grads[0].defined()) return {at::Tensor()};
    const at::Tensor positions = positions_.unpack();
    const bool taken = is_plain(grads[0]) && !transforms_active() &&
                       grads[0].device() == positions.device() &&
                       grads[0].sizes() == positions.sizes();
    const bool differentiable = at::GradMode::is_enabled();
    return {differentiable || !taken ? by_torch(grads[0], positions) : gather(grads[0], positions)};
  }

 private:
  at::Tensor gather(const at::Tensor& grad_output, const at::Tensor& positions) const {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::cuda::CUDAGuard device(grad_output.device());
    at::Tensor grad = grad_output.to(dtype()).contiguous(kPoolFormat);
    if (!is_aligned(grad)) grad = grad.clone();
    const at::Tensor found = empty_pooled(input_sizes(), grad, dtype());
    MaxPool p = pool_;
    p.positions = positions.data_ptr<uint8_t>();
    p.grad_output = grad.const_data_ptr();
    p.grad_input = found.mutable_data_ptr();
    C10_CUDA_CHECK(max_pool_backward_cuda(p, c10::cuda::getCurrentCUDAStream()));
    return found;
  }

  // For a gradient of the gradient, and for gradients that aren't plain tensors.
  at::Tensor by_torch(const at::Tensor& grad_output, const at::Tensor& positions) const {
    const at::Tensor input = empty_pooled(input_sizes(), positions, dtype());
    return at::max_pool2d_with_indices_backward(grad_output,
                                                input,
                                                {pool_.kernel[0], pool_.kernel[1]},
                                                {pool_.stride[0], pool_.stride[1]},
                                                {pool_.padding[0], pool_.padding[1]},
                                                1,
                                                ceil_mode_,
                                                indices(positions));
  }

  // As torch has them: row * columns + column within the input.
  at::Tensor indices(const at::Tensor& bytes) const {
    const auto corners = [&](int d) {
      const auto options = bytes.options().dtype(at::kLong);
      return at::arange(pool_.pooled[d], options).mul(pool_.stride[d]).sub(pool_.padding[d]);
    };
    const at::Tensor positions = bytes.to(at::kLong);
    const at::Tensor rows = positions.floor_divide(pool_.kernel[1]).add(corners(0).unsqueeze(1));
    const at::Tensor columns = positions.remainder(pool_.kernel[1]).add(corners(1));
    return rows.mul(pool_.size[1]).add(columns);
  }

  std::array<int64_t, 4> input_sizes() const {
    return {pool_.n_samples, pool_.n_channels, pool_.size[0], pool_.size[1]};
  }
  at::ScalarType dtype() const {
    return pool_.dtype == ScalarType::kHalf ? at::kHalf : at::kBFloat16;
  }

  MaxPool pool_{};
  bool ceil_mode_ = false;
  torch::autograd::SavedVariable positions_;
};

// -- What is taken -------------------------------------------------------------------------------

constexpr int64_t kMostInPool = std::numeric_limits<int32_t>::max() / 2;

// An argument: a number for rows and one for columns, or one for both.
bool read(at::IntArrayRef from, int64_t least, int64_t most, int (&to)[2]) {
  if (from.size() != 1 && from.size() != 2) return false;
  for (int d : {0, 1}) {
    const int64_t value = from[from.size() == 1 ? 0 : d];
    if (value < least || value > most) return false;
    to[d] = static_cast<int>(value);
  }
  return true;
}

}  // namespace

// What torch would refuse is left to it too.
bool describe_pool(const at::Tensor& input,
                   at::IntArrayRef kernel_size,
                   at::IntArrayRef stride,
                   at::IntArrayRef padding,
                   at::IntArrayRef dilation,
                   bool ceil_mode,
                   MaxPool& p) {
  const at::ScalarType dtype = input.scalar_type();
  if (!is_plain(input) || (dtype != at::kHalf && dtype != at::kBFloat16) || input.dim() != 4 ||
      input.numel() == 0 || input.size(1) % kPoolChannels != 0 ||
      input.suggest_memory_format() != kPoolFormat || !input.is_contiguous(kPoolFormat) ||
      !is_aligned(input)) {
    return false;
  }
  int dilations[2];
  if (!read(kernel_size, 1, kNoPosition, p.kernel) ||
      !read(stride.empty() ? kernel_size : stride, 1, kMostInPool, p.stride) ||
      !read(padding, 0, kNoPosition, p.padding) || !read(dilation, 1, 1, dilations) ||
      p.kernel[0] * p.kernel[1] > kNoPosition) {
    return false;
  }
  for (int d : {0, 1}) {
    const int64_t size = input.size(2 + d);
    if (size > kMostInPool || p.padding[d] > p.kernel[d] / 2) return false;
    const int64_t pooled = count_windows(size, p.kernel[d], p.stride[d], p.padding[d], ceil_mode);
    if (pooled < 1) return false;
    p.size[d] = static_cast<int>(size);
    p.pooled[d] = static_cast<int>(pooled);
  }
  const int64_t n = input.size(0), rows = std::max(p.size[0], p.pooled[0]);
  const int64_t columns = std::max(p.size[1], p.pooled[1]), c = input.size(1);
  if (n > kMostInPool / rows || c > kMostInPool || c / kPoolChannels > kMostPoolVectors / columns) {
    return false;
  }
  p.dtype = dtype == at::kHalf ? ScalarType::kHalf : ScalarType::kBFloat16;
  p.n_samples = static_cast<int>(n);
  p.n_channels = static_cast<int>(c);
  return true;
}

namespace {

at::Tensor max_pool2d(c10::DispatchKeySet keys,
                      const at::Tensor& input,
                      at::IntArrayRef kernel_size,
                      at::IntArrayRef stride,
                      at::IntArrayRef padding,
                      at::IntArrayRef dilation,
                      bool ceil_mode) {
  MaxPool p{};
  if (!within_step(input) ||
      !describe_pool(input, kernel_size, stride, padding, dilation, ceil_mode, p)) {
    return at::_ops::max_pool2d::redispatch(
        keys & kBelowAutocast, input, kernel_size, stride, padding, dilation, ceil_mode);
  }
  const bool differentiable = at::GradMode::is_enabled() && input.requires_grad();
  at::Tensor output, positions;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const c10::cuda::CUDAGuard device(input.device());
    const std::array<int64_t, 4> sizes{p.n_samples, p.n_channels, p.pooled[0], p.pooled[1]};
    output = empty_pooled(sizes, input, input.scalar_type());
    if (differentiable) {
      positions = empty_pooled(sizes, input, at::kByte);
      p.positions = positions.data_ptr<uint8_t>();
    }
    p.input = input.const_data_ptr();
    p.output = output.mutable_data_ptr();
    C10_CUDA_CHECK(max_pool_forward_cuda(p, c10::cuda::getCurrentCUDAStream()));
  }
  if (differentiable) {
    const auto node = make_node<MaxPoolBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(input));
    node->save(p, ceil_mode, positions);
    torch::autograd::set_history(output, node);
  }
  return output;
}

}  // namespace

void register_max_pool(torch::Library& aten) { add_rule(aten, "max_pool2d", "", max_pool2d); }

}  // namespace torch_renaissance
