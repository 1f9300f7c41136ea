// SPDX-License-Identifier: BSD-3-Clause
// What the kernels share: types of arithmetic, 16-byte vectors, gradients of another dtype.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../update.h"

namespace torch_renaissance {

inline constexpr int kThreads = 256;
// Slots of the smaller kernel arguments: ResNet-50, a GPT-2 of 12 layers.
inline constexpr int kFewSlots = 192;

template <typename scalar_t>
struct OpMath {
  using type = float;
};
template <>
struct OpMath<double> {
  using type = double;
};

template <typename scalar_t, int N = 16 / sizeof(scalar_t)>
struct alignas(N * sizeof(scalar_t)) Vector {
  static constexpr int kSize = N;
  scalar_t value[N];
};

// Vector `i` of a gradient that has the parameter's dtype or, by its slot's flags, a 16-bit one.
template <int N, typename scalar_t>
__device__ __forceinline__ Vector<scalar_t, N> load_grad(const void* grad, int i, int flags) {
  const auto load = [&](auto zero) {
    const auto from = static_cast<const Vector<decltype(zero), N>*>(grad)[i];
    Vector<scalar_t, N> to;
#pragma unroll
    for (int j = 0; j < N; ++j) to.value[j] = static_cast<scalar_t>(from.value[j]);
    return to;
  };
  if constexpr (sizeof(scalar_t) == sizeof(float)) {
    if (flags & kHalfGrad) return load(__half());
    if (flags & kBFloat16Grad) return load(__nv_bfloat16());
  }
  return static_cast<const Vector<scalar_t, N>*>(grad)[i];
}

template <typename to_t, int N, typename scalar_t>
__device__ __forceinline__ void save_as(void* to, int i, const Vector<scalar_t, N>& from) {
  Vector<to_t, N> converted;
#pragma unroll
  for (int j = 0; j < N; ++j) {
    converted.value[j] = static_cast<to_t>(static_cast<float>(from.value[j]));
  }
  static_cast<Vector<to_t, N>*>(to)[i] = converted;
}

template <int N, typename scalar_t>
__device__ __forceinline__ void save_grad(void* grad,
                                          int i,
                                          int flags,
                                          const Vector<scalar_t, N>& from) {
  if constexpr (sizeof(scalar_t) == sizeof(float)) {
    if (flags & kHalfGrad) return save_as<__half>(grad, i, from);
    if (flags & kBFloat16Grad) return save_as<__nv_bfloat16>(grad, i, from);
  }
  static_cast<Vector<scalar_t, N>*>(grad)[i] = from;
}

// Bytes of one element of the slot's gradient.
template <typename scalar_t>
__device__ __forceinline__ int grad_bytes(int flags) {
  return sizeof(scalar_t) == sizeof(float) && (flags & (kHalfGrad | kBFloat16Grad)) != 0
             ? 2
             : static_cast<int>(sizeof(scalar_t));
}

// Where chunk `block` of the launch is.
__device__ __forceinline__ int find_segment(const Segment* segments, int64_t& block) {
  int which = 0;
  while (block >= segments[which].n_chunks) block -= segments[which++].n_chunks;
  return which;
}

}  // namespace torch_renaissance
