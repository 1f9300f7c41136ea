// SPDX-License-Identifier: BSD-3-Clause
// Batch normalisation forward, row by row: sums for the batch's moments, and what is written.
#pragma once

#include "batch_norm.cuh"

namespace torch_renaissance {

constexpr int kMomentRows = 8;  // nothing but sums to remember: twice as many on their way

// Of a thread's rows, about the first of the block's.
template <typename scalar_t>
struct MomentSums {
  float shift[kNormVector] = {}, sum[kNormVector] = {}, squares[kNormVector] = {};
  float bias[kNormVector] = {};

  __device__ MomentSums(const BatchNorm& n, const NormPlace& p) {
    if (p.first + p.lane < p.last) {
      unpack<scalar_t>(read_bits<scalar_t>(n.input, p.first * n.channels + p.channel), shift);
      if (n.input_bias != nullptr) {
        unpack<scalar_t>(read_bits<scalar_t>(n.input_bias, p.channel), bias);
#pragma unroll
        for (int k = 0; k < kNormVector; ++k) shift[k] = rounded<scalar_t>(shift[k] + bias[k]);
      }
    }
    if (n.input_bias != nullptr) __syncthreads();  // that row will be written
  }
  // Where there is a bias, adds it to `bits` first, and writes them back to `place`.
  __device__ void add(const BatchNorm& n, NormBits& bits, int64_t place) {
    float x[kNormVector];
    unpack<scalar_t>(bits, x);
    if (n.input_bias != nullptr) {
#pragma unroll
      for (int k = 0; k < kNormVector; ++k) x[k] = rounded<scalar_t>(x[k] + bias[k]);
      bits = pack<scalar_t>(x);
      write_bits<scalar_t>(n.input, place, bits);
    }
#pragma unroll
    for (int k = 0; k < kNormVector; ++k) {
      const float distance = x[k] - shift[k];
      sum[k] += distance;
      squares[k] = std::fma(distance, distance, squares[k]);
    }
  }
  // Of the channel that for_own_channel() gives this thread, over the block's rows.
  __device__ Moments of_block(const NormPlace& p, NormShared& shared) {
    if (p.lane == 0) {
#pragma unroll
      for (int k = 0; k < kNormVector; ++k) shared.shift[p.in_tile + k] = shift[k];
    }
    const float2 sums = add_lanes(sum, squares, p, shared);
    if (threadIdx.x >= p.vectors * kNormVector) return {};
    return Moments::of(shared.shift[threadIdx.x], sums.x, sums.y, p.rows());
  }
};

__device__ inline float rows_of_chunk(const BatchNorm& n, const NormTiling& t, int chunk) {
  return static_cast<float>(min(t.rows_per_chunk, n.rows - chunk * t.rows_per_chunk));
}

// Keeps what backward and evaluation need of a channel.
template <typename scalar_t>
__device__ inline void finish(const BatchNorm& n, int channel, const Moments& m) {
  const auto rows = static_cast<float>(n.rows);
  n.mean[channel] = m.mean;
  n.invstd[channel] = inverse_std(m, rows, n.eps);
  if (n.running_mean != nullptr) {
    float &mean = n.running_mean[channel], &var = n.running_var[channel];
    const float absent =
        n.absent_bias == nullptr
            ? 0.0f
            : static_cast<float>(static_cast<const scalar_t*>(n.absent_bias)[channel]);
    mean = running(mean, m.mean + absent, n.momentum);
    var = running(var, m.squares / (rows - 1), n.momentum);
  }
}

// Of one row of a thread: what `bits` of the input, and of the residual if there is one, become.
// Rounded where torch's separate operations would.
template <typename scalar_t>
__device__ void write_row(const BatchNorm& n,
                          const Normalise (&norm)[kNormVector],
                          const NormBits& bits,
                          const NormBits& residual_bits,
                          int64_t place) {
  float x[kNormVector], residual[kNormVector];
  unpack<scalar_t>(bits, x);
  unpack<scalar_t>(residual_bits, residual);
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) x[k] = rounded<scalar_t>(norm[k](x[k]));
  if (n.sum != nullptr) write_bits<scalar_t>(n.output, place, pack<scalar_t>(x));
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) {
    if (n.residual != nullptr) x[k] = rounded<scalar_t>(x[k] + residual[k]);
    if (n.relu && x[k] <= 0) x[k] = 0;
  }
  write_bits<scalar_t>(n.sum != nullptr ? n.sum : n.output, place, pack<scalar_t>(x));
}

}  // namespace torch_renaissance
