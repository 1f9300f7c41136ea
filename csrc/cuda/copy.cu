// SPDX-License-Identifier: BSD-3-Clause
// Copies of a step's inputs and results: nodes of its graph, with a kernel for all of them.
#include <algorithm>

#include "last_node.h"
#include "launch.h"

namespace torch_renaissance {
namespace {

constexpr int kCopyThreads = 256;
constexpr int kMostCopyBlocks = 256;  // of each copy: inputs are small

__global__ void __launch_bounds__(kCopyThreads) copy_kernel(const __grid_constant__ Copies c) {
  const auto& item = c.item[blockIdx.y];
  const auto to = static_cast<char*>(item.to);
  const auto from = static_cast<const char*>(item.from);
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from)) & 15) == 0;
  const int64_t vectors = aligned ? item.bytes / 16 : 0;
  const int64_t first = blockIdx.x * int64_t{kCopyThreads} + threadIdx.x;
  const int64_t stride = gridDim.x * int64_t{kCopyThreads};
  for (int64_t i = first; i < vectors; i += stride) {
    reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  }
  for (int64_t i = vectors * 16 + first; i < item.bytes; i += stride) to[i] = from[i];
}

cudaKernelNodeParams copy_params(const Copies& c, void** arguments) {
  int64_t most = 1;
  for (int i = 0; i < c.n; ++i) most = std::max(most, c.item[i].bytes);
  const int64_t blocks = (most + kCopyThreads * 16 - 1) / (kCopyThreads * 16);
  arguments[0] = const_cast<Copies*>(&c);
  cudaKernelNodeParams p{};
  p.func = reinterpret_cast<void*>(copy_kernel);
  p.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>(blocks, kMostCopyBlocks)), c.n);
  p.blockDim = dim3(kCopyThreads);
  p.kernelParams = arguments;
  return p;
}

}  // namespace

cudaError_t capture_copy_cuda(const Copies& c, cudaStream_t stream, cudaGraphNode_t* node) {
  void* arguments[1];
  const cudaKernelNodeParams p = copy_params(c, arguments);
  const cudaError_t error = cudaLaunchKernel(p.func, p.gridDim, p.blockDim, arguments, 0, stream);
  if (error != cudaSuccess) return error;
  *node = last_node(stream).node;
  return *node != nullptr ? cudaSuccess : cudaErrorInvalidValue;
}

cudaError_t set_copy_cuda(const Copies& c, cudaGraphExec_t exec, cudaGraphNode_t node) {
  void* arguments[1];
  const cudaKernelNodeParams p = copy_params(c, arguments);
  return cudaGraphExecKernelNodeSetParams(exec, node, &p);
}

}  // namespace torch_renaissance
