// SPDX-License-Identifier: BSD-3-Clause
// Squares of gradients, and whether all are finite.
#pragma once

#include "vector.cuh"

namespace torch_renaissance {

// `bad` stays 0 unless a gradient isn't finite, whatever its square does.
template <typename T>
struct Squares {
  T sum = T(0), bad = T(0);
};

template <int N, typename scalar_t, typename T>
__device__ __forceinline__ void add_squares(const void* grad,
                                            int i,
                                            int flags,
                                            T factor,
                                            Squares<T>& to) {
  const auto g = load_grad<N, scalar_t>(grad, i, flags);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const T value = static_cast<T>(g.value[j]);
    const T unscaled = value * factor;
    to.sum = std::fma(unscaled, unscaled, to.sum);
    to.bad = std::fma(value, T(0), to.bad);
  }
}

// Of one chunk of a gradient, each element times `factor`: what this thread of the block sees.
template <int THREADS, typename scalar_t, typename T>
__device__ __forceinline__ void add_chunk(const void* grad,
                                          int32_t flags,
                                          const Chunk& chunk,
                                          T factor,
                                          Squares<T>& to) {
  constexpr int N = Vector<scalar_t>::kSize;
  if (grad == nullptr) return;
  grad = static_cast<const char*>(grad) + chunk.start * grad_bytes<scalar_t>(flags);
  const int vectors = (reinterpret_cast<uintptr_t>(grad) & 15) == 0 ? chunk.count / N : 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    add_squares<N, scalar_t>(grad, i, flags, factor, to);
  }
  for (int i = vectors * N + threadIdx.x; i < chunk.count; i += THREADS) {
    add_squares<1, scalar_t>(grad, i, flags, factor, to);
  }
}

}  // namespace torch_renaissance
