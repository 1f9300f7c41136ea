// SPDX-License-Identifier: BSD-3-Clause
// What both directions of batch normalisation share: which part of the matrix a thread works on,
// and how a tile's sums come together.
//
// Note [One launch or two]
// All rows of a channel are read before the first is written. Where the registers of a cluster of
// blocks hold the rows of a tile, these exchange their sums through shared memory and then write:
// one launch. Else one launch reduces, whose last block of each tile (by ticket,
// see Note [One launch] in cross_entropy.cuh) adds up what the others left, and another one writes;
// it begins with the rows that were read last, which the cache still has. Sums are always added in
// the same order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../math/batch_norm.h"
#include "batch_norm.h"

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#include <cooperative_groups.h>
#define TR_HAS_CLUSTERS
#endif

namespace torch_renaissance {

constexpr int kNormWarps = kNormThreads / 32;
constexpr int kMostTileChannels = 64;  // of a launch that reduces

// Until then nothing may be read that a kernel writes, nor written; see launch_norm().
__device__ __forceinline__ void wait_for_previous() {
#ifdef TR_HAS_CLUSTERS
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel's blocks may get the places of those that have ended, and wait there.
__device__ __forceinline__ void let_next_come() {
#ifdef TR_HAS_CLUSTERS
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// kNormVector numbers as they lie in memory.
using NormBits = uint2;

template <typename scalar_t>
__device__ __forceinline__ NormBits read_bits(const void* matrix, int64_t place) {
  return *reinterpret_cast<const NormBits*>(static_cast<const scalar_t*>(matrix) + place);
}

template <typename scalar_t>
__device__ __forceinline__ void write_bits(void* matrix, int64_t place, const NormBits& bits) {
  *reinterpret_cast<NormBits*>(static_cast<scalar_t*>(matrix) + place) = bits;
}

template <typename scalar_t>
__device__ __forceinline__ void unpack(const NormBits& bits, float (&values)[kNormVector]) {
  const auto numbers = reinterpret_cast<const scalar_t*>(&bits);
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) values[k] = static_cast<float>(numbers[k]);
}

template <typename scalar_t>
__device__ __forceinline__ NormBits pack(const float (&values)[kNormVector]) {
  NormBits bits;
  const auto numbers = reinterpret_cast<scalar_t*>(&bits);
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) numbers[k] = static_cast<scalar_t>(values[k]);
  return bits;
}

// What a float is once it has been written and read.
template <typename scalar_t>
__device__ __forceinline__ float rounded(float value) {
  return static_cast<float>(static_cast<scalar_t>(value));
}

// A thread's channels, and its rows of the chunk from `first` to before `last`: first + lane,
// first + lane + lanes, ...
struct NormPlace {
  int channel, in_tile;  // the first of kNormVector, in the matrix and in the tile
  int vectors, lane, lanes;
  int64_t first, last;

  __device__ float rows() const { return static_cast<float>(last - first); }

  static __device__ NormPlace of(const NormTiling& t, int64_t rows, int channels) {
    NormPlace p;
    p.vectors = 1 << t.log2_vectors;
    p.lanes = kNormThreads >> t.log2_vectors;
    p.lane = threadIdx.x >> t.log2_vectors;
    p.in_tile = (threadIdx.x & (p.vectors - 1)) * kNormVector;
    p.channel = blockIdx.x * t.tile_channels() + p.in_tile;
    p.first = blockIdx.y * t.rows_per_chunk;
    p.last = min(p.first + t.rows_per_chunk, rows);
    if (p.channel >= channels) p.lane = kMostNormRows;  // beyond the last channel, and the last row
    return p;
  }
};

// Calls f(u, place of row u in the matrix) for those of a thread's rows that there are, of `ROWS`
// from the given one on, `step` apart.
template <int ROWS, typename F>
__device__ __forceinline__ void for_rows(const NormPlace& p,
                                         int64_t row,
                                         int64_t step,
                                         int channels,
                                         F&& f) {
#pragma unroll
  for (int u = 0; u < ROWS; ++u, row += step) {
    if (row < p.first || row >= p.last) break;
    f(u, row * channels + p.channel);
  }
}

// Calls f(channel, in the tile) for the one channel that this thread finishes, if it has one.
template <typename F>
__device__ __forceinline__ void for_own_channel(const NormTiling& t, int channels, F&& f) {
  const int in_tile = threadIdx.x;
  const int channel = blockIdx.x * t.tile_channels() + in_tile;
  if (in_tile < t.tile_channels() && channel < channels) f(channel, in_tile);
}

// -- Sums of two numbers per channel --------------------------------------------------------------

struct NormShared {
  float of_warp[2][kNormWarps][kMostTileChannels];
  float2 of_group[kNormThreads];
  float2 of_block[kMostTileChannels];  // in a cluster, read by all of its blocks
  float shift[kMostTileChannels];
  float first[kMostTileChannels], second[kMostTileChannels];  // what a cluster has added up
  bool last;
};

// Over the block's rows, of the channel that for_own_channel() gives this thread.
__device__ inline float2 add_lanes(float (&a)[kNormVector],
                                   float (&b)[kNormVector],
                                   const NormPlace& p,
                                   NormShared& shared) {
  for (int offset = 16; offset >= p.vectors; offset /= 2) {
#pragma unroll
    for (int k = 0; k < kNormVector; ++k) {
      a[k] += __shfl_xor_sync(0xffffffffu, a[k], offset);
      b[k] += __shfl_xor_sync(0xffffffffu, b[k], offset);
    }
  }
  const int warp = threadIdx.x / 32;
  if (threadIdx.x % 32 < p.vectors) {
#pragma unroll
    for (int k = 0; k < kNormVector; ++k) {
      shared.of_warp[0][warp][p.in_tile + k] = a[k];
      shared.of_warp[1][warp][p.in_tile + k] = b[k];
    }
  }
  __syncthreads();
  float2 total{0, 0};
  if (threadIdx.x < p.vectors * kNormVector) {
#pragma unroll
    for (int w = 0; w < kNormWarps; ++w) {
      total.x += shared.of_warp[0][w][threadIdx.x];
      total.y += shared.of_warp[1][w][threadIdx.x];
    }
  }
  return total;
}

static __device__ int32_t norm_tickets[kTickets];

// Leaves what this block has of its channel. True in all threads of a tile's last block, which
// sees what all have left.
__device__ inline bool is_last_of_tile(const NormTiling& t,
                                       const NormScratch& scratch,
                                       float2 own,
                                       NormShared& shared) {
  const int T = t.tile_channels();
  const auto partials = reinterpret_cast<float2*>(scratch.partials);
  if (threadIdx.x < T) {
    partials[(int64_t{blockIdx.x} * t.chunks + blockIdx.y) * T + threadIdx.x] = own;
  }
  int32_t* ticket = scratch.tickets != nullptr ? scratch.tickets + blockIdx.x
                                               : norm_tickets + scratch.first_ticket + blockIdx.x;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    shared.last = atomicAdd(ticket, 1) == t.chunks - 1;
    if (shared.last) *ticket = 0;
  }
  __syncthreads();
  __threadfence();
  return shared.last;
}

// What the tile's first chunk has left of a channel.
__device__ inline float2 first_of_chunks(const NormTiling& t,
                                         const NormScratch& scratch,
                                         int in_tile) {
  const auto partials = reinterpret_cast<const float2*>(scratch.partials);
  return __ldcg(partials + int64_t{blockIdx.x} * t.chunks * t.tile_channels() + in_tile);
}

// In a tile's last block: add(total, one, chunk, the first) for what each chunk has left of the
// channel that for_own_channel() gives this thread. Several threads take a part of the chunks each.
template <typename Total, typename Add>
__device__ Total
add_chunks(const NormTiling& t, const NormScratch& scratch, NormShared& shared, Add&& add) {
  const int T = t.tile_channels(), groups = kNormThreads / T;
  const int in_tile = threadIdx.x % T, group = threadIdx.x / T;
  const auto partials = reinterpret_cast<const float2*>(scratch.partials) +
                        int64_t{blockIdx.x} * t.chunks * T + in_tile;
  const float2 shift = first_of_chunks(t, scratch, in_tile);
  Total total{};
#pragma unroll 8
  for (int chunk = group; chunk < t.chunks; chunk += groups) {
    add(total, __ldcg(partials + int64_t{chunk} * T), chunk, shift);
  }
  static_assert(sizeof(Total) == sizeof(float2));
  const auto of_group = reinterpret_cast<Total*>(shared.of_group);
  of_group[threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.x < T) {
    for (int g = 1; g < groups; ++g) total.add(of_group[g * T + threadIdx.x]);
  }
  return total;
}

}  // namespace torch_renaissance
