// SPDX-License-Identifier: BSD-3-Clause
// Sums over a block, always in the same order.
#pragma once

namespace torch_renaissance {

// Valid in thread 0. `shared` has room for a value of each warp.
template <int THREADS>
__device__ double sum_of_block(double value, double* shared) {
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0) {
    for (int warp = 0; warp < THREADS / 32; ++warp) total += shared[warp];
  }
  return total;
}

}  // namespace torch_renaissance
