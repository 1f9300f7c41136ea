// SPDX-License-Identifier: BSD-3-Clause
#include "tickets.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <mutex>
#include <unordered_map>

namespace torch_renaissance {

int take_tickets(cudaStream_t stream, int count) {
  static std::mutex mutex;
  static std::unordered_map<cudaStream_t, int> of_stream;
  static int next = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto take = [&](int n) {
    if (next + n > kTickets) return kTickets;
    next += n;
    return next - n;
  };
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return take(count);
  }
  const auto found = of_stream.find(stream);
  if (found != of_stream.end()) return found->second;
  const int first = take(kMostTickets);
  if (first != kTickets) of_stream[stream] = first;
  return first;
}

}  // namespace torch_renaissance
