// SPDX-License-Identifier: BSD-3-Clause
// Copies of a step's inputs and results: one launch for all of them.
#include <algorithm>

#include "launch.h"

namespace torch_renaissance {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 256;  // of each copy: inputs are small

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ Copies c) {
  const auto& item = c.item[blockIdx.y];
  const auto to = static_cast<char*>(item.to);
  const auto from = static_cast<const char*>(item.from);
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 15) == 0;
  const int64_t vectors = aligned ? item.bytes / 16 : 0;
  const int64_t first = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t stride = gridDim.x * int64_t{kThreads};
  for (int64_t i = first; i < vectors; i += stride) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  for (int64_t i = vectors * 16 + first; i < item.bytes; i += stride) to[i] = from[i];
}

}  // namespace

cudaError_t copy_cuda(const Copies& c, cudaStream_t stream) {
  int64_t most = 0;
  for (int i = 0; i < c.n; ++i) most = std::max(most, c.item[i].bytes);
  if (most == 0) return cudaSuccess;
  const int64_t blocks = (most + kThreads * 16 - 1) / (kThreads * 16);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(blocks, kMaxBlocks)), c.n);
  copy_kernel<<<grid, kThreads, 0, stream>>>(c);
  return cudaGetLastError();
}

}  // namespace torch_renaissance
