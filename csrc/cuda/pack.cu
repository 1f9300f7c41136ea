// SPDX-License-Identifier: BSD-3-Clause
// Gathers gradients into a contiguous plane, and writes small tables from kernel arguments.
#include <algorithm>
#include <cstring>

#include "launch.h"
#include "vector.cuh"

namespace torch_renaissance {
namespace {

struct PackArguments {
  Segment segments[kMaxSegments];
  struct {
    const void* grad;
    int32_t flags;
  } slots[kMaxSlots];
  bool adds;
};

template <int N, typename scalar_t>
__device__ __forceinline__ void pack_vector(scalar_t* plane,
                                            const void* grad,
                                            int i,
                                            int flags,
                                            bool adds) {
  using V = Vector<scalar_t, N>;
  V g = grad != nullptr ? load_grad<N, scalar_t>(grad, i, flags) : V{};
  if (adds) {
    const V before = reinterpret_cast<V*>(plane)[i];
#pragma unroll
    for (int j = 0; j < N; ++j) g.value[j] = before.value[j] + g.value[j];
  }
  reinterpret_cast<V*>(plane)[i] = g;
}

// Planes and chunk starts are 16-byte aligned.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) pack_kernel(const __grid_constant__ PackArguments a) {
  constexpr int N = Vector<scalar_t>::kSize;
  int64_t block = blockIdx.x;
  const Segment& segment = a.segments[find_segment(a.segments, block)];
  const Chunk chunk = segment.chunks[block];
  const auto& slot = a.slots[segment.first_slot + chunk.slot];
  if (a.adds && slot.grad == nullptr) return;
  auto plane = static_cast<scalar_t*>(segment.planes[0]) + chunk.offset;
  const auto grad = slot.grad == nullptr ? nullptr
                                         : static_cast<const char*>(slot.grad) +
                                               chunk.start * grad_bytes<scalar_t>(slot.flags);
  const int vectors = (reinterpret_cast<uintptr_t>(grad) & 15) == 0 ? chunk.count / N : 0;
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    pack_vector<N>(plane, grad, i, slot.flags, a.adds);
  }
  for (int i = vectors * N + threadIdx.x; i < chunk.count; i += kThreads) {
    pack_vector<1>(plane, grad, i, slot.flags, a.adds);
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
  for (int64_t s = 0; s < p.n_slots; ++s) a.slots[s] = {p.slots[s].grad, p.slots[s].flags};
  a.adds = p.adds;
  if (blocks == 0) return cudaSuccess;
  switch (p.dtype) {
    case ScalarType::kFloat:
      pack_kernel<float><<<blocks, kThreads, 0, stream>>>(a);
      break;
    case ScalarType::kDouble:
      pack_kernel<double><<<blocks, kThreads, 0, stream>>>(a);
      break;
    case ScalarType::kHalf:
      pack_kernel<__half><<<blocks, kThreads, 0, stream>>>(a);
      break;
    case ScalarType::kBFloat16:
      pack_kernel<__nv_bfloat16><<<blocks, kThreads, 0, stream>>>(a);
      break;
  }
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
