// SPDX-License-Identifier: BSD-3-Clause
// What csrc/cuda/last_node.h needs of CUDA, where there is none.
#pragma once

#include <cstddef>

using cudaError_t = int;
using cudaStream_t = void*;
using cudaGraph_t = void*;
using cudaGraphNode_t = struct EmulatedNode*;
constexpr cudaError_t cudaSuccess = 0;
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusActive = 1 };

#define CUDART_VERSION 13000
inline cudaError_t cudaStreamGetCaptureInfo(cudaStream_t,
                                            cudaStreamCaptureStatus*,
                                            unsigned long long* = nullptr,
                                            cudaGraph_t* = nullptr,
                                            const cudaGraphNode_t** = nullptr,
                                            const void** = nullptr,
                                            size_t* = nullptr) {
  return 1;  // nothing is ever captured
}
