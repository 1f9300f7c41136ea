// SPDX-License-Identifier: BSD-3-Clause
// Gathers gradients into a contiguous plane, and writes small tables from kernel arguments.
#include <algorithm>
#include <cstring>

#include "launch.h"

namespace torch_renaissance {
namespace {

constexpr int kThreads = 256;

struct PackArguments {
  Segment segments[kMaxSegments];
  const void* grads[kMaxSlots];
};

// Copies bytes: the dtype only scales offsets. Planes and chunk starts are 16-byte aligned.
__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ PackArguments a, int size) {
  int which = 0;
  int64_t block = blockIdx.x;
  while (block >= a.segments[which].n_chunks) block -= a.segments[which++].n_chunks;
  const Segment& segment = a.segments[which];
  const Chunk chunk = segment.chunks[block];
  const void* grad = a.grads[segment.first_slot + chunk.slot];
  const int bytes = chunk.count * size;
  auto to = static_cast<char*>(segment.planes[0]) + chunk.offset * size;
  auto from = static_cast<const char*>(grad) + chunk.start * size;
  const bool aligned = (reinterpret_cast<uintptr_t>(from) & 15) == 0;
  const int vectors = aligned ? bytes / 16 : 0;
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    reinterpret_cast<uint4*>(to)[i] =
        grad != nullptr ? reinterpret_cast<const uint4*>(from)[i] : uint4{0, 0, 0, 0};
  }
  for (int i = vectors * 16 + threadIdx.x * 2; i < bytes; i += kThreads * 2) {
    *reinterpret_cast<uint16_t*>(to + i) =
        grad != nullptr ? *reinterpret_cast<const uint16_t*>(from + i) : uint16_t{0};
  }
}

constexpr int kMaxValues = 4000;

struct Values {
  double value[kMaxValues];
};

__global__ void write_values_kernel(const __grid_constant__ Values values,
                                    double* __restrict__ to,
                                    int count) {
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < count) to[i] = values.value[i];
}

}  // namespace

cudaError_t pack_cuda(const Pack& p, cudaStream_t stream) {
  PackArguments a;
  int64_t blocks = 0;
  for (int i = 0; i < kMaxSegments; ++i) {
    a.segments[i] = i < p.n_segments ? p.segments[i] : Segment{};
    blocks += a.segments[i].n_chunks;
  }
  for (int64_t s = 0; s < p.n_slots; ++s) a.grads[s] = p.slots[s].grad;
  if (blocks == 0) return cudaSuccess;
  const int size = p.dtype == ScalarType::kDouble ? 8 : p.dtype == ScalarType::kFloat ? 4 : 2;
  pack_kernel<<<blocks, kThreads, 0, stream>>>(a, size);
  return cudaGetLastError();
}

cudaError_t write_values_cuda(double* to,
                              const double* values,
                              int64_t count,
                              cudaStream_t stream) {
  for (int64_t begin = 0; begin < count; begin += kMaxValues) {
    const auto n = static_cast<int>(std::min<int64_t>(count - begin, kMaxValues));
    Values v;
    std::memcpy(v.value, values + begin, n * sizeof(double));
    write_values_kernel<<<(n + kThreads - 1) / kThreads, kThreads, 0, stream>>>(v, to + begin, n);
  }
  return cudaGetLastError();
}

}  // namespace torch_renaissance
