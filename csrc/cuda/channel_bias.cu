// SPDX-License-Identifier: BSD-3-Clause
// The bias of a convolution whose output is channels_last. Torch adds it by a kernel for any
// layout, at a third of the memory's speed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "channel_bias.h"

namespace torch_renaissance {
namespace {

constexpr int kBiasThreads = 256, kBiasRows = 4;

struct BiasGrid {
  dim3 blocks, threads;

  // Threads of a row side by side, then rows.
  explicit BiasGrid(const ChannelBias& b) {
    const int vectors = b.channels / kBiasVector;
    unsigned wide = 1;
    while (wide < 32 && wide < static_cast<unsigned>(vectors)) wide *= 2;
    threads = dim3(wide, kBiasThreads / wide);
    const int64_t rows = int64_t{threads.y} * kBiasRows;
    const auto down = std::clamp<int64_t>((b.rows + rows - 1) / rows, 1, 1 << 30);
    blocks = dim3(static_cast<unsigned>(down), (vectors + wide - 1) / wide);
  }
};

template <typename scalar_t>
__device__ void add_bias(const ChannelBias& b) {
  struct alignas(16) Eight {
    scalar_t value[kBiasVector];
  };
  const int channel = (blockIdx.y * blockDim.x + threadIdx.x) * kBiasVector;
  if (channel >= b.channels || b.rows == 0) return;
  const auto bias = *reinterpret_cast<const Eight*>(static_cast<const scalar_t*>(b.bias) + channel);
  const int64_t step = int64_t{gridDim.x} * blockDim.y;
  int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  while (row < b.rows) {
    Eight x[kBiasRows];
    int64_t r = row;
#pragma unroll
    for (int u = 0; u < kBiasRows; ++u, r += step) {
      if (r >= b.rows) break;
      x[u] = *reinterpret_cast<const Eight*>(static_cast<const scalar_t*>(b.matrix) +
                                             r * b.channels + channel);
    }
    r = row;
#pragma unroll
    for (int u = 0; u < kBiasRows; ++u, r += step) {
      if (r >= b.rows) break;
#pragma unroll
      for (int k = 0; k < kBiasVector; ++k) {
        const float sum = static_cast<float>(x[u].value[k]) + static_cast<float>(bias.value[k]);
        x[u].value[k] = static_cast<scalar_t>(sum);
      }
      *reinterpret_cast<Eight*>(static_cast<scalar_t*>(b.matrix) + r * b.channels + channel) = x[u];
    }
    row = r;
  }
}

__global__ void __launch_bounds__(kBiasThreads)
    channel_bias_kernel(const __grid_constant__ ChannelBias b) {
  if (b.bfloat16) {
    add_bias<__nv_bfloat16>(b);
  } else {
    add_bias<__half>(b);
  }
}

}  // namespace

cudaError_t channel_bias_cuda(const ChannelBias& b, cudaStream_t stream) {
  const BiasGrid grid(b);
  channel_bias_kernel<<<grid.blocks, grid.threads, 0, stream>>>(b);
  return cudaGetLastError();
}

cudaError_t set_channel_bias_cuda(const ChannelBias& b, cudaGraphNode_t node) {
  cudaKernelNodeParams p{};
  if (const cudaError_t error = cudaGraphKernelNodeGetParams(node, &p)) return error;
  const BiasGrid grid(b);
  void* arguments[] = {const_cast<ChannelBias*>(&b)};
  p.gridDim = grid.blocks;
  p.kernelParams = arguments;
  return cudaGraphKernelNodeSetParams(node, &p);
}

}  // namespace torch_renaissance
