// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <mutex>
#include <optional>
#include <utility>

#include "../autocast_rules.h"
#include "channel_bias.h"

namespace torch_renaissance {
namespace {

bool takes_bias(const at::Tensor& output, const at::Tensor& bias) {
  const auto format =
      output.dim() == 5 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  const bool half = output.scalar_type() == at::kHalf || output.scalar_type() == at::kBFloat16;
  return half && is_plain(output) && is_plain(bias) && (output.dim() == 4 || output.dim() == 5) &&
         output.is_contiguous(format) && output.numel() > 0 && output.size(1) % kBiasVector == 0 &&
         bias.scalar_type() == output.scalar_type() && bias.device() == output.device() &&
         bias.dim() == 1 && bias.is_contiguous() && bias.size(0) == output.size(1) &&
         is_aligned(output) && is_aligned(bias);
}

struct KeptGrad {
  c10::weak_intrusive_ptr<c10::TensorImpl> grad;
  uint32_t version;
  at::Tensor bias_grad;
};

std::mutex kept_mutex;
std::optional<KeptGrad> kept;

}  // namespace

void keep_bias_grad(const at::Tensor& grad, const at::Tensor& bias_grad) {
  const std::lock_guard<std::mutex> lock(kept_mutex);
  kept.emplace(KeptGrad{c10::weak_intrusive_ptr<c10::TensorImpl>(grad.getIntrusivePtr()),
                        grad._version(),
                        bias_grad});
}

at::Tensor take_bias_grad(const at::Tensor& grad) {
  const std::lock_guard<std::mutex> lock(kept_mutex);
  const std::optional<KeptGrad> found = std::exchange(kept, std::nullopt);
  const bool same = found && found->grad.lock().get() == grad.unsafeGetTensorImpl() &&
                    found->version == grad._version();
  return same ? found->bias_grad : at::Tensor();
}

void drop_bias_grad() {
  const std::lock_guard<std::mutex> lock(kept_mutex);
  kept.reset();
}

bool add_channel_bias(const at::Tensor& output, const at::Tensor& bias) {
  if (!takes_bias(output, bias)) return false;
  const c10::cuda::CUDAGuard guard(output.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  ChannelBias b{};
  b.channels = static_cast<int>(output.size(1));
  b.rows = output.numel() / b.channels;
  b.bfloat16 = output.scalar_type() == at::kBFloat16;
  b.matrix = output.mutable_data_ptr();
  b.bias = bias.const_data_ptr();
  C10_CUDA_CHECK(channel_bias_cuda(b, stream));
  captured_bias = {last_node(stream), b};
  return true;
}

}  // namespace torch_renaissance
