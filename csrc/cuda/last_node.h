// SPDX-License-Identifier: BSD-3-Clause
// Where a capture has got to.
#pragma once

#include <cuda_runtime_api.h>

namespace torch_renaissance {

// A node of a graph that is being captured; null for none.
struct CapturedNode {
  cudaGraphNode_t node = nullptr;
  unsigned long long capture = 0;  // which no other capture of the program is

  bool operator==(const CapturedNode& other) const {
    return node == other.node && capture == other.capture;
  }
};

// Which capture a stream is part of; 0 for none.
inline unsigned long long capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  unsigned long long capture = 0;
#if CUDART_VERSION >= 13000
  const auto error = cudaStreamGetCaptureInfo(stream, &status, &capture);
#else
  const auto error = cudaStreamGetCaptureInfo_v2(stream, &status, &capture);
#endif
  return error == cudaSuccess && status == cudaStreamCaptureStatusActive ? capture : 0;
}

// The one node after which the next one on a stream will come; null where there are several or
// none, or nothing is captured.
inline CapturedNode last_node(cudaStream_t stream) {
  cudaStreamCaptureStatus status;
  CapturedNode found;
  const cudaGraphNode_t* last = nullptr;
  size_t n = 0;
#if CUDART_VERSION >= 13000
  const auto error =
      cudaStreamGetCaptureInfo(stream, &status, &found.capture, nullptr, &last, nullptr, &n);
#else
  const auto error =
      cudaStreamGetCaptureInfo_v2(stream, &status, &found.capture, nullptr, &last, &n);
#endif
  if (error != cudaSuccess || status != cudaStreamCaptureStatusActive || n != 1) return {};
  found.node = *last;
  return found;
}

}  // namespace torch_renaissance
