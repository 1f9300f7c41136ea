// SPDX-License-Identifier: BSD-3-Clause
// Lets one formula serve the CPU loops and the CUDA kernels.
#pragma once

#include <cmath>

#ifdef __CUDACC__
#define TR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TR_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace torch_renaissance {

// torch divides a tensor by a number on the CPU, and multiplies by the reciprocal on CUDA. So do
// we, to round alike: divide(x, as_divisor(b)).
template <typename T>
TR_HOST_DEVICE T as_divisor(T b) {
#ifdef __CUDA_ARCH__
  return T(1) / b;
#else
  return b;
#endif
}

template <typename T>
TR_HOST_DEVICE T divide(T x, T divisor) {
#ifdef __CUDA_ARCH__
  return x * divisor;
#else
  return x / divisor;
#endif
}

// The IEEE square root, and x - weight * (a / b). On CUDA zeros would take the slow path of root
// and division, and dead units have many of them: a one takes their place.
template <typename T>
TR_HOST_DEVICE T root(T x) {
#ifdef __CUDA_ARCH__
  const bool zero = x == T(0);
  const T r = std::sqrt(zero ? T(1) : x);
  return zero ? x : r;
#else
  return std::sqrt(x);
#endif
}

template <typename T>
TR_HOST_DEVICE T subtract_quotient(T x, T weight, T a, T b) {
#ifdef __CUDA_ARCH__
  const bool zero = a == T(0);
  return std::fma(zero ? -T(0) : -weight, (zero ? T(1) : a) / b, x);
#else
  return std::fma(-weight, a / b, x);
#endif
}

}  // namespace torch_renaissance
