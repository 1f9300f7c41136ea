// SPDX-License-Identifier: BSD-3-Clause
// Lets one formula serve the CPU loops and the CUDA kernels.
#pragma once

#ifdef __CUDACC__
#define TR_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TR_HOST_DEVICE inline __attribute__((always_inline))
#endif
