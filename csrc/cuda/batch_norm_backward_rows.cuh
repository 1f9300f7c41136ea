// SPDX-License-Identifier: BSD-3-Clause
// Batch normalisation backward, row by row: what ReLU let pass, sums for the gradients of weight
// and bias, and the gradient of the input.
#pragma once

#include "batch_norm.cuh"

namespace torch_renaissance {

struct NormSums {
  float grad = 0, along = 0;  // of grad, and of grad * (x - mean)

  __device__ void add(const NormSums& other) {
    grad += other.grad;
    along += other.along;
  }
};

__device__ inline void finish(const BatchNormBackward& n, int channel, const NormSums& sums) {
  n.grad_bias[channel] = sums.grad;
  n.grad_weight[channel] = sums.along * n.invstd[channel];
}

// One channel forward, as far as backward needs it.
template <NormMask MASK>
__device__ __forceinline__ Normalise normalise_of(const BatchNormBackward& n, int channel) {
  const float mean = n.mean[channel];
  if constexpr (MASK != NormMask::kOfOutput) return {mean, 0, 0};
  return {mean, n.weight[channel] * n.invstd[channel], n.bias[channel]};
}

__device__ __forceinline__ NormaliseBackward backward_of(const BatchNormBackward& n,
                                                         int channel,
                                                         float grad_bias,
                                                         float grad_weight) {
  return NormaliseBackward::of(n.mean[channel],
                               n.invstd[channel],
                               n.weight[channel],
                               grad_weight,
                               grad_bias,
                               static_cast<float>(n.rows));
}

// What ReLU let pass of a gradient.
template <typename scalar_t, NormMask MASK>
__device__ __forceinline__ void mask(float (&grad)[kNormVector],
                                     const float (&x)[kNormVector],
                                     const Normalise (&norm)[kNormVector],
                                     const NormBits& results) {
  if constexpr (MASK != NormMask::kNone) {
    float result[kNormVector];
    if constexpr (MASK == NormMask::kOfResult) unpack<scalar_t>(results, result);
#pragma unroll
    for (int k = 0; k < kNormVector; ++k) {
      if constexpr (MASK == NormMask::kOfOutput) result[k] = rounded<scalar_t>(norm[k](x[k]));
      grad[k] = result[k] <= 0 ? 0.0f : grad[k];
    }
  }
}

// What backward reads of one row of a thread.
struct GradRow {
  NormBits input, grad, result, more;

  template <typename scalar_t, NormMask MASK>
  static __device__ GradRow read(const BatchNormBackward& n, int64_t place) {
    GradRow row;
    row.input = read_bits<scalar_t>(n.input, place);
    row.grad = read_bits<scalar_t>(n.grad, place);
    if (MASK == NormMask::kOfResult) {
      row.result = read_bits<scalar_t>(n.result, place);
      if (n.more_grad != nullptr) row.more = read_bits<scalar_t>(n.more_grad, place);
    }
    return row;
  }
};

// Of a thread's rows.
template <typename scalar_t, NormMask MASK>
struct GradSums {
  float sum[kNormVector] = {}, along[kNormVector] = {};
  Normalise norm[kNormVector] = {};

  __device__ GradSums(const BatchNormBackward& n, const NormPlace& p) {
    if (p.first + p.lane >= p.last) return;
#pragma unroll
    for (int k = 0; k < kNormVector; ++k) norm[k] = normalise_of<MASK>(n, p.channel + k);
  }
  // Returns what passed.
  __device__ NormBits add(const BatchNormBackward& n, const GradRow& row) {
    float x[kNormVector], grad[kNormVector];
    unpack<scalar_t>(row.input, x);
    unpack<scalar_t>(row.grad, grad);
    if (MASK == NormMask::kOfResult && n.more_grad != nullptr) {
      float more[kNormVector];
      unpack<scalar_t>(row.more, more);
#pragma unroll
      for (int k = 0; k < kNormVector; ++k) grad[k] = rounded<scalar_t>(grad[k] + more[k]);
    }
    mask<scalar_t, MASK>(grad, x, norm, row.result);
#pragma unroll
    for (int k = 0; k < kNormVector; ++k) {
      sum[k] += grad[k];
      along[k] = std::fma(grad[k], x[k] - norm[k].mean, along[k]);
    }
    return pack<scalar_t>(grad);
  }
  // Of the channel that for_own_channel() gives this thread, over the block's rows.
  __device__ NormSums of_block(const NormPlace& p, NormShared& shared) {
    const float2 sums = add_lanes(sum, along, p, shared);
    return {sums.x, sums.y};
  }
};

// The gradient of the input, from that which passed.
template <typename scalar_t>
__device__ NormBits input_grad(const NormaliseBackward (&backward)[kNormVector],
                               const float (&x)[kNormVector],
                               const float (&grad)[kNormVector]) {
  float found[kNormVector];
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) found[k] = backward[k](x[k], grad[k]);
  return pack<scalar_t>(found);
}

}  // namespace torch_renaissance
