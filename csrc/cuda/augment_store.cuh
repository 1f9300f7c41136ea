// SPDX-License-Identifier: BSD-3-Clause
// A few pixels at a time into the output, in its dtype and memory format.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../augment.h"

namespace torch_renaissance {

__device__ __forceinline__ float nan_of_device() { return __int_as_float(0x7FFFFFFF); }

__device__ __forceinline__ uint8_t as_byte(float x) {
  return static_cast<uint8_t>(round_to_int(x > 0.0f ? (x < 255.0f ? x : 255.0f) : 0.0f));
}

template <typename scalar_t, int N>
struct alignas(sizeof(scalar_t) * N < 16 ? sizeof(scalar_t) * N : 16) Group {
  scalar_t value[N];
};

// Values at, ..., at + N - 1 of the output, of which `count` exist; `dense`: all, and aligned.
template <typename scalar_t, int N, typename Convert>
__device__ __forceinline__ void store_as(void* out,
                                         int64_t at,
                                         const float (&v)[N],
                                         int count,
                                         bool dense,
                                         Convert convert) {
  Group<scalar_t, N> group;
#pragma unroll
  for (int k = 0; k < N; ++k) group.value[k] = convert(v[k]);
  auto to = static_cast<scalar_t*>(out) + at;
  if (dense) {
    *reinterpret_cast<Group<scalar_t, N>*>(to) = group;
  } else {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k < count) to[k] = group.value[k];
    }
  }
}

template <int N>
__device__ __forceinline__ void store(const Augment& job,
                                      int64_t at,
                                      const float (&v)[N],
                                      int count,
                                      bool dense) {
  switch (job.dtype) {
    case PixelType::kByte:
      return store_as<uint8_t>(job.out, at, v, count, dense, as_byte);
    case PixelType::kFloat:
      return store_as<float>(job.out, at, v, count, dense, [](float x) { return x; });
    case PixelType::kHalf:
      return store_as<__half>(
          job.out, at, v, count, dense, [](float x) { return __float2half_rn(x); });
    case PixelType::kBFloat16:
      return store_as<__nv_bfloat16>(
          job.out, at, v, count, dense, [](float x) { return __float2bfloat16_rn(x); });
  }
}

// Pixels first, ..., first + N - 1 of the `pixels` of sample i.
template <int C, int N>
__device__ __forceinline__ void store_group(const Augment& job,
                                            const float (&values)[C][N],
                                            int64_t i,
                                            int32_t first,
                                            int32_t pixels) {
  const bool dense = pixels % N == 0;
  const int count = min(N, pixels - first);
  const int64_t sample = i * C * pixels;
  if constexpr (C > 1) {
    if (job.out_channels_last) {
#pragma unroll
      for (int part = 0; part < C; ++part) {
        float v[N];
#pragma unroll
        for (int k = 0; k < N; ++k) v[k] = values[(part * N + k) % C][(part * N + k) / C];
        const int at = part * N;
        store(job, sample + static_cast<int64_t>(first) * C + at, v, count * C - at, dense);
      }
      return;
    }
  }
#pragma unroll
  for (int c = 0; c < C; ++c) {
    store(job, sample + static_cast<int64_t>(c) * pixels + first, values[c], count, dense);
  }
}

}  // namespace torch_renaissance
