// SPDX-License-Identifier: BSD-3-Clause
// Layer normalisation: a warp for each row, whose registers hold it. Backward, a block's warps go
// on to further rows and keep what they add to the gradients of vectors; a second launch adds up
// what blocks have left, always in the same order.
#include "layer_norm.h"

#include <algorithm>

#include "../math/layer_norm.h"
#include "batch_norm.cuh"
#include "launch.h"

namespace torch_renaissance {
namespace {

constexpr int kVector = kLayerNormVector;
static_assert(kVector == kNormVector);
constexpr int kWarp = 32;
constexpr int kForwardWarps = 8;
constexpr int kMostVectors = kMostLayerNormChannels / (kWarp * kVector);  // of a lane

struct Four {
  float v[kVector];
};

__device__ __forceinline__ Four read_floats(const float* row, int channel) {
  const float4 f = *reinterpret_cast<const float4*>(row + channel);
  return {{f.x, f.y, f.z, f.w}};
}

__device__ __forceinline__ void write_floats(float* row, int channel, const Four& x) {
  *reinterpret_cast<float4*>(row + channel) = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
}

template <typename scalar_t>
__device__ __forceinline__ Four widen(const NormBits& bits) {
  Four x;
  unpack<scalar_t>(bits, x.v);
  return x;
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}

// Calls f(v, channel) for a lane's vectors of a row.
template <int VECTORS, typename F>
__device__ __forceinline__ void for_vectors(int channels, F&& f) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int v = 0; v < VECTORS; ++v) {
    const int channel = (v * kWarp + lane) * kVector;
    if (channel < channels) f(v, channel);
  }
}

template <typename scalar_t, int VECTORS>
__global__ void __launch_bounds__(kForwardWarps* kWarp)
    layer_norm_kernel(const __grid_constant__ LayerNorm n) {
  const int64_t row = int64_t{blockIdx.x} * kForwardWarps + threadIdx.x / kWarp;
  if (row >= n.rows) return;
  const int64_t first = row * n.channels;
  Four x[VECTORS];
  NormBits branch[VECTORS];
  for_vectors<VECTORS>(n.channels, [&](int v, int channel) {
    x[v] = read_floats(n.input + first, channel);
    if (n.branch != nullptr) branch[v] = read_bits<scalar_t>(n.branch, first + channel);
  });
  if (n.branch != nullptr) {
    for_vectors<VECTORS>(n.channels, [&](int v, int channel) {
      Four more = widen<scalar_t>(branch[v]);
      if (n.branch_bias != nullptr) {
        const Four bias = widen<scalar_t>(read_bits<scalar_t>(n.branch_bias, channel));
#pragma unroll
        for (int k = 0; k < kVector; ++k) more.v[k] += bias.v[k];
        more = widen<scalar_t>(pack<scalar_t>(more.v));  // as the layer's output would be
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) x[v].v[k] += more.v[k];
      write_floats(n.sum + first, channel, x[v]);
    });
  }
  const auto channels = static_cast<float>(n.channels);
  float sum = 0, squares = 0;
  for_vectors<VECTORS>(n.channels, [&](int v, int) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) sum += x[v].v[k];
  });
  const float mean = sum_of_warp(sum) / channels;
  for_vectors<VECTORS>(n.channels, [&](int v, int) {
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      const float distance = x[v].v[k] - mean;
      squares = std::fma(distance, distance, squares);
    }
  });
  const auto norm = NormaliseRow::of(mean, sum_of_warp(squares), channels, n.eps);
  for_vectors<VECTORS>(n.channels, [&](int v, int channel) {
    const Four weight = read_floats(n.weight, channel), bias = read_floats(n.bias, channel);
#pragma unroll
    for (int k = 0; k < kVector; ++k) x[v].v[k] = norm(x[v].v[k], weight.v[k], bias.v[k]);
    write_bits<scalar_t>(n.output, first + channel, pack<scalar_t>(x[v].v));
  });
  if (threadIdx.x % kWarp == 0) {
    n.mean[row] = norm.mean;
    n.rstd[row] = norm.rstd;
  }
}

// -- Backward -------------------------------------------------------------------------------------

template <int VECTORS>
struct VectorSums {
  Four weight[VECTORS] = {}, bias[VECTORS] = {}, branch_bias[VECTORS] = {};
};

template <typename scalar_t, int VECTORS>
__device__ __forceinline__ void backward_of_row(const LayerNormBackward& n,
                                                int64_t row,
                                                VectorSums<VECTORS>& sums) {
  const int64_t first = row * n.channels;
  const NormaliseRow norm{n.mean[row], n.rstd[row]};
  Four x[VECTORS], rest[VECTORS];
  NormBits grads[VECTORS];
  for_vectors<VECTORS>(n.channels, [&](int v, int channel) {
    x[v] = read_floats(n.sum + first, channel);
    grads[v] = read_bits<scalar_t>(n.grad, first + channel);
  });
  if (n.grad_sum != nullptr) {
    for_vectors<VECTORS>(n.channels, [&](int v, int channel) {
      rest[v] = read_floats(n.grad_sum + first, channel);
    });
  }
  float mean_grad = 0, along = 0;
  for_vectors<VECTORS>(n.channels, [&](int v, int channel) {
    const Four grad = widen<scalar_t>(grads[v]), weight = read_floats(n.weight, channel);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      x[v].v[k] = norm.normal(x[v].v[k]);
      const float weighted = grad.v[k] * weight.v[k];
      mean_grad += weighted;
      along = std::fma(weighted, x[v].v[k], along);
      sums.bias[v].v[k] += grad.v[k];
      sums.weight[v].v[k] = std::fma(grad.v[k], x[v].v[k], sums.weight[v].v[k]);
    }
  });
  mean_grad = sum_of_warp(mean_grad) / static_cast<float>(n.channels);
  along = sum_of_warp(along) / static_cast<float>(n.channels);
  for_vectors<VECTORS>(n.channels, [&](int v, int channel) {
    const Four grad = widen<scalar_t>(grads[v]), weight = read_floats(n.weight, channel);
    Four found;
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      found.v[k] = norm.gradient(grad.v[k] * weight.v[k], x[v].v[k], mean_grad, along);
      if (n.grad_sum != nullptr) found.v[k] += rest[v].v[k];
    }
    write_floats(n.grad_input + first, channel, found);
    if (n.grad_branch == nullptr) return;
    const NormBits bits = pack<scalar_t>(found.v);
    write_bits<scalar_t>(n.grad_branch, first + channel, bits);
    const Four rounded = widen<scalar_t>(bits);
#pragma unroll
    for (int k = 0; k < kVector; ++k) sums.branch_bias[v].v[k] += rounded.v[k];
  });
}

// Backward's registers allow one block for each multiprocessor.
template <int VECTORS>
constexpr int kBackwardWarps = VECTORS <= 6 ? 12 : 8;

template <int VECTORS>
using SharedSums = float[kBackwardWarps<VECTORS>][VECTORS * kWarp * kVector];

// Adds up one of the sums over the block's warps, and leaves it in `partials`.
template <int VECTORS>
__device__ __forceinline__ void leave_sums(const Four (&sums)[VECTORS],
                                           int channels,
                                           float* partials,
                                           SharedSums<VECTORS>& shared) {
  __syncthreads();
  for_vectors<VECTORS>(channels, [&](int v, int channel) {
    write_floats(shared[threadIdx.x / kWarp], channel, sums[v]);
  });
  __syncthreads();
  for (int channel = threadIdx.x; channel < channels; channel += blockDim.x) {
    float total = 0;
#pragma unroll
    for (int warp = 0; warp < kBackwardWarps<VECTORS>; ++warp) total += shared[warp][channel];
    partials[channel] = total;
  }
}

template <typename scalar_t, int VECTORS>
__global__ void __launch_bounds__(kBackwardWarps<VECTORS>* kWarp)
    layer_norm_backward_kernel(const __grid_constant__ LayerNormBackward n, float* partials) {
  __shared__ __align__(16) SharedSums<VECTORS> shared;
  VectorSums<VECTORS> sums;
  const int64_t step = int64_t{gridDim.x} * kBackwardWarps<VECTORS>;
  int64_t row = int64_t{blockIdx.x} * kBackwardWarps<VECTORS> + threadIdx.x / kWarp;
#pragma unroll 1
  for (; row < n.rows; row += step) backward_of_row<scalar_t, VECTORS>(n, row, sums);
  float* own = partials + int64_t{blockIdx.x} * kLayerNormSums * n.channels;
  leave_sums<VECTORS>(sums.weight, n.channels, own, shared);
  leave_sums<VECTORS>(sums.bias, n.channels, own + n.channels, shared);
  if (n.grad_branch_bias != nullptr) {
    leave_sums<VECTORS>(sums.branch_bias, n.channels, own + 2 * n.channels, shared);
  }
}

constexpr int kColumns = 32, kGroups = 16;  // of a block that adds up

// Blocks in x: kColumns of the channels; in y: which of the sums.
template <typename scalar_t>
__global__ void __launch_bounds__(kColumns* kGroups)
    layer_norm_sums_kernel(const __grid_constant__ LayerNormBackward n,
                           int blocks,
                           const float* partials) {
  __shared__ float of_group[kGroups][kColumns];
  const int column = threadIdx.x % kColumns, group = threadIdx.x / kColumns;
  const int channel = blockIdx.x * kColumns + column;
  const int which = blockIdx.y;
  float total = 0;
  if (channel < n.channels) {
#pragma unroll 4
    for (int block = group; block < blocks; block += kGroups) {
      total += partials[(int64_t{block} * kLayerNormSums + which) * n.channels + channel];
    }
  }
  of_group[group][column] = total;
  __syncthreads();
  if (group > 0 || channel >= n.channels) return;
#pragma unroll
  for (int g = 1; g < kGroups; ++g) total += of_group[g][column];
  if (which == 0) n.grad_weight[channel] = total;
  if (which == 1) n.grad_bias[channel] = total;
  if (which == 2) {
    static_cast<scalar_t*>(n.grad_branch_bias)[channel] = static_cast<scalar_t>(total);
  }
}

// Calls f(a lane's vectors, as an integral constant) for a row of `channels`.
template <int VECTORS, typename F>
void with_vectors(int channels, F&& f) {
  if constexpr (VECTORS > 0) {
    if (channels > (VECTORS - 1) * kWarp * kVector) {
      f(std::integral_constant<int, VECTORS>());
    } else {
      with_vectors<VECTORS - 1>(channels, f);
    }
  }
}

template <typename scalar_t>
void launch(const LayerNorm& n, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>((n.rows + kForwardWarps - 1) / kForwardWarps);
  with_vectors<kMostVectors>(n.channels, [&](auto vectors) {
    layer_norm_kernel<scalar_t, vectors.value><<<blocks, kForwardWarps * kWarp, 0, stream>>>(n);
  });
}

template <typename scalar_t>
void launch(const LayerNormBackward& n, int blocks, float* partials, cudaStream_t stream) {
  with_vectors<kMostVectors>(n.channels, [&](auto vectors) {
    layer_norm_backward_kernel<scalar_t, vectors.value>
        <<<blocks, kBackwardWarps<vectors.value> * kWarp, 0, stream>>>(n, partials);
  });
  const int sums = n.grad_branch_bias != nullptr ? kLayerNormSums : 2;
  const dim3 grid((n.channels + kColumns - 1) / kColumns, sums);
  layer_norm_sums_kernel<scalar_t><<<grid, kColumns * kGroups, 0, stream>>>(n, blocks, partials);
}

}  // namespace

int layer_norm_blocks(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>(rows / 8, 1, multiprocessors()));
}

cudaError_t layer_norm_cuda(const LayerNorm& n, cudaStream_t stream) {
  n.bfloat16 ? launch<__nv_bfloat16>(n, stream) : launch<__half>(n, stream);
  return cudaGetLastError();
}

cudaError_t layer_norm_backward_cuda(const LayerNormBackward& n,
                                     int blocks,
                                     float* partials,
                                     cudaStream_t stream) {
  n.bfloat16 ? launch<__nv_bfloat16>(n, blocks, partials, stream)
             : launch<__half>(n, blocks, partials, stream);
  return cudaGetLastError();
}

}  // namespace torch_renaissance
