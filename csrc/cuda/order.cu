// SPDX-License-Identifier: BSD-3-Clause
// The samples of one batch on CUDA, one thread a sample; and the cursor, set by a launch.
#include <algorithm>

#include "order.h"

namespace torch_renaissance {
namespace {

constexpr int kOrderThreads = 256;
constexpr int64_t kMostOrderBlocks = 1 << 16;  // beyond, a thread takes several turns

__global__ void __launch_bounds__(kOrderThreads) order_kernel(const OrderBatch b) {
  const Cursor cursor = *b.cursor;
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kOrderThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kOrderThreads + threadIdx.x; i < b.size;
       i += stride) {
    b.out[i] = sample_at(b.order, cursor, b.size, i);
  }
}

__global__ void place_cursor_kernel(Cursor* to, const Cursor place) { *to = place; }

}  // namespace

cudaError_t order_cuda(const OrderBatch& b, cudaStream_t stream) {
  if (b.size == 0) return cudaSuccess;
  const int64_t blocks = std::min(kMostOrderBlocks, (b.size + kOrderThreads - 1) / kOrderThreads);
  order_kernel<<<blocks, kOrderThreads, 0, stream>>>(b);
  return cudaGetLastError();
}

cudaError_t place_cursor_cuda(Cursor* to, const Cursor& place, cudaStream_t stream) {
  place_cursor_kernel<<<1, 1, 0, stream>>>(to, place);
  return cudaGetLastError();
}

}  // namespace torch_renaissance
