// SPDX-License-Identifier: BSD-3-Clause
// Lets one formula serve the CPU loops and the CUDA kernels.
#pragma once

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

}  // namespace torch_renaissance
