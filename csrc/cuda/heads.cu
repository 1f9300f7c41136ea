// SPDX-License-Identifier: BSD-3-Clause
// The gradients of queries, keys and values become that of the matrix they came from, and its sums
// the gradient of the projection's bias.
#include "column_sums.cuh"
#include "columns.h"

namespace torch_renaissance {
namespace {

template <typename scalar_t>
__global__ void __launch_bounds__(kNormThreads, 2)
    pack_heads_kernel(const __grid_constant__ Heads h,
                      const NormTiling t,
                      const NormScratch scratch) {
  __shared__ NormShared shared;
  const int width = h.heads * h.size, channels = 3 * width;
  const int64_t n_rows = int64_t{h.batch} * h.length;
  const auto p = NormPlace::of(t, n_rows, channels);
  const int part = min(p.channel / width, 2), within = p.channel % width;
  const int64_t* strides = h.strides[part];
  const int64_t first = within / h.size * strides[1] + within % h.size;
  float sums[kNormVector] = {};
#pragma unroll 1
  for (int64_t r = p.first + p.lane; r < p.last; r += kNormRows * p.lanes) {
    NormBits bits[kNormRows];
    for_rows<kNormRows>(p, r, p.lanes, channels, [&](int u, int64_t) {
      const auto row = static_cast<int>(r) + u * p.lanes;
      const int64_t place = row / h.length * strides[0] + row % h.length * strides[2];
      bits[u] = read_bits<scalar_t>(h.parts[part], first + place);
    });
    for_rows<kNormRows>(p, r, p.lanes, channels, [&](int u, int64_t place) {
      write_bits<scalar_t>(h.packed, place, bits[u]);
      add_to<scalar_t>(sums, bits[u]);
    });
  }
  write_sums<scalar_t>(h.sums, false, channels, t, scratch, p, sums, shared);
}

}  // namespace

cudaError_t pack_heads_cuda(const Heads& h,
                            const NormTiling& tiling,
                            const NormScratch& scratch,
                            cudaStream_t stream) {
  const auto launch = [&](auto number) {
    pack_heads_kernel<decltype(number)>
        <<<norm_grid(tiling), kNormThreads, 0, stream>>>(h, tiling, scratch);
  };
  h.bfloat16 ? launch(__nv_bfloat16()) : launch(__half());
  return cudaGetLastError();
}

}  // namespace torch_renaissance
