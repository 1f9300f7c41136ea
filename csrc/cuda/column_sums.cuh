// SPDX-License-Identifier: BSD-3-Clause
// Sums of columns, as the gradient of a bias is one. Blocks share the matrix as in batch norm,
// whose Note [One launch or two] says how sums come together.
#pragma once

#include "batch_norm_launch.cuh"

namespace torch_renaissance {

struct ColumnSum {
  float value = 0, unused = 0;
  __device__ void add(const ColumnSum& other) { value += other.value; }
};

// Writes the sums of all rows once the tile's last block is there.
template <typename scalar_t>
__device__ __forceinline__ void write_sums(void* found,
                                           bool as_floats,
                                           int channels,
                                           const NormTiling& t,
                                           const NormScratch& scratch,
                                           const NormPlace& p,
                                           float (&sums)[kNormVector],
                                           NormShared& shared) {
  float none[kNormVector] = {};
  const float2 own = add_lanes(sums, none, p, shared);
  if (!is_last_of_tile(t, scratch, own, shared)) return;
  const auto total = add_chunks<ColumnSum>(
      t, scratch, shared, [](ColumnSum& all, float2 chunk, int, float2) { all.value += chunk.x; });
  for_own_channel(t, channels, [&](int channel, int) {
    if (as_floats) {
      static_cast<float*>(found)[channel] = total.value;
    } else {
      static_cast<scalar_t*>(found)[channel] = static_cast<scalar_t>(total.value);
    }
  });
}

template <typename scalar_t>
__device__ __forceinline__ void add_to(float (&sums)[kNormVector], const NormBits& bits) {
  float values[kNormVector];
  unpack<scalar_t>(bits, values);
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) sums[k] += values[k];
}

}  // namespace torch_renaissance
