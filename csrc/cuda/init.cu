// SPDX-License-Identifier: BSD-3-Clause
// fill_random_ on CUDA: one thread a block of random bits.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "init.h"

namespace torch_renaissance {
namespace {

constexpr int kFillThreads = 256;
constexpr int64_t kMostFillBlocks = 1 << 16;  // beyond, a thread takes several turns

template <typename scalar_t>
__global__ void __launch_bounds__(kFillThreads) fill_random_kernel(const __grid_constant__ Fill f) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kFillThreads;
  const auto round = [](double x) {
    if constexpr (sizeof(scalar_t) == 8) return x;
    if constexpr (sizeof(scalar_t) != 8) return static_cast<scalar_t>(static_cast<float>(x));
  };
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kFillThreads + threadIdx.x; 2 * i < f.count;
       i += stride) {
    fill_block<scalar_t>(f, i, round);
  }
}

template <typename scalar_t>
cudaError_t launch(const Fill& f, cudaStream_t stream) {
  if (f.count == 0) return cudaSuccess;
  const int64_t per_block = 2 * kFillThreads;
  const int64_t blocks = std::min(kMostFillBlocks, (f.count + per_block - 1) / per_block);
  fill_random_kernel<scalar_t><<<blocks, kFillThreads, 0, stream>>>(f);
  return cudaGetLastError();
}

}  // namespace

cudaError_t fill_random_cuda(const Fill& f, cudaStream_t stream) {
  switch (f.dtype) {
    case ScalarType::kFloat:
      return launch<float>(f, stream);
    case ScalarType::kDouble:
      return launch<double>(f, stream);
    case ScalarType::kHalf:
      return launch<__half>(f, stream);
    case ScalarType::kBFloat16:
      return launch<__nv_bfloat16>(f, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torch_renaissance
