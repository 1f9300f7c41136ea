// SPDX-License-Identifier: BSD-3-Clause
// The norms of each weight and gradient, for LARS: sums of squares of each chunk, then of each
// slot, always in the same order; the last block finishes what norm.cu finds besides.
#include "../math/chain.h"
#include "launch.h"
#include "reduce.cuh"
#include "vector.cuh"

namespace torch_renaissance {
namespace {

// Four vectors of a chunk for each: fewer threads have less to add up among them.
constexpr int kChunkThreads = 128;

template <int SLOTS>
struct LarsArguments {
  Segment segments[kMaxSegments];
  const double* control;
  double* chain;
  int32_t* counters;
  const float* grad_scale;
  float* loss_scale;
  int32_t* growth_tracker;
  bool first, last, wide;
  struct {
    const void* param;
    const void* grad;
    int32_t flags, first_chunk;
  } slots[SLOTS];
};

__device__ __forceinline__ ChunkSquares* squares_of(const Segment& segment) {
  return reinterpret_cast<ChunkSquares*>(segment.norms + segment.n_slots);
}

// In double, no square of a normal fp32 leaves the range.
template <int N, typename scalar_t>
__device__ __forceinline__ void add_squares(const Vector<scalar_t, N>& from, double& sum) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const auto value =
        static_cast<double>(static_cast<typename OpMath<scalar_t>::type>(from.value[j]));
    sum = std::fma(value, value, sum);
  }
}

template <typename scalar_t, int SLOTS>
__global__ void __launch_bounds__(kChunkThreads)
    chunk_squares_kernel(const __grid_constant__ LarsArguments<SLOTS> a) {
  constexpr int N = Vector<scalar_t>::kSize;
  __shared__ double shared[2][kChunkThreads / 32];
  int64_t block = blockIdx.x;
  const Segment& segment = a.segments[find_segment(a.segments, block)];
  const Chunk chunk = segment.chunks[block];
  const auto& slot = a.slots[segment.first_slot + chunk.slot];
  double weight = 0, gradient = 0;
  if (slot.grad != nullptr) {
    const auto param = static_cast<const scalar_t*>(slot.param) + chunk.start;
    const auto grad =
        static_cast<const char*>(slot.grad) + chunk.start * grad_bytes<scalar_t>(slot.flags);
    const bool aligned =
        ((reinterpret_cast<uintptr_t>(param) | reinterpret_cast<uintptr_t>(grad)) & 15) == 0;
    const int vectors = aligned ? chunk.count / N : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < vectors; i += kChunkThreads) {
      const auto w = reinterpret_cast<const Vector<scalar_t>*>(param)[i];
      const auto g = load_grad<N, scalar_t>(grad, i, slot.flags);
      add_squares(w, weight);
      add_squares(g, gradient);
    }
    // The tail, and tensors at odd addresses.
    for (int i = vectors * N + threadIdx.x; i < chunk.count; i += kChunkThreads) {
      add_squares(reinterpret_cast<const Vector<scalar_t, 1>*>(param)[i], weight);
      add_squares(load_grad<1, scalar_t>(grad, i, slot.flags), gradient);
    }
  }
  weight = sum_of_block<kChunkThreads>(weight, shared[0]);
  gradient = sum_of_block<kChunkThreads>(gradient, shared[1]);
  if (threadIdx.x == 0) squares_of(segment)[block] = {weight, gradient};
}

// T: the dtype of a norm in torch.
template <typename T, int SLOTS>
__global__ void __launch_bounds__(kThreads)
    slot_norms_kernel(const __grid_constant__ LarsArguments<SLOTS> a) {
  __shared__ double shared[kThreads / 32];
  __shared__ bool last;
  const int slot = blockIdx.x;
  int which = 0;
  while (slot >= a.segments[which].first_slot + a.segments[which].n_slots) ++which;
  const Segment& segment = a.segments[which];
  const int index = slot - segment.first_slot;
  const int64_t begin = a.slots[slot].first_chunk;
  const int64_t end =
      index + 1 < segment.n_slots ? a.slots[slot + 1].first_chunk : segment.n_chunks;
  double weight = 0, gradient = 0;
#pragma unroll 4
  for (int64_t c = begin + threadIdx.x; c < end; c += kThreads) {
    const ChunkSquares squares = squares_of(segment)[c];
    weight += squares.weight;
    gradient += squares.grad;
  }
  weight = sum_of_block<kThreads>(weight, shared);
  gradient = sum_of_block<kThreads>(gradient, shared);
  if (threadIdx.x == 0) {
    segment.norms[index].weight = std::sqrt(weight);
    segment.norms[index].grad = std::sqrt(gradient);
    __threadfence();
    last = atomicAdd(a.counters + kTicket, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  double mine = 0;
  for (int i = 0; i < kMaxSegments && a.segments[i].n_slots > 0; ++i) {
    for (int s = threadIdx.x; s < a.segments[i].n_slots; s += kThreads) {
      const double norm = __ldcg(&a.segments[i].norms[s].grad);
      mine = std::fma(norm, norm, mine);
    }
  }
  double total = sum_of_block<kThreads>(mine, shared);
  if (threadIdx.x == 0) {
    a.counters[kTicket] = 0;
    const double factor =
        unscale_factor(a.control, a.grad_scale != nullptr ? a.grad_scale : a.loss_scale);
    total = total * factor * factor + (a.first ? 0.0 : a.chain[kSumOfSquares]);
    a.chain[kSumOfSquares] = total;
    if (a.last) {
      finish_chain(
          a.control, total, isfinite(total), a.wide, a.loss_scale, a.growth_tracker, a.chain);
    }
  }
}

template <typename scalar_t, int SLOTS>
cudaError_t launch_lars_norms(const Norm& n, cudaStream_t stream) {
  LarsArguments<SLOTS> a;
  int64_t chunks = 0;
  for (int i = 0; i < kMaxSegments; ++i) {
    a.segments[i] = i < n.n_segments ? n.segments[i] : Segment{};
    chunks += a.segments[i].n_chunks;
  }
  if (chunks == 0) return cudaSuccess;
  a.control = n.control;
  a.chain = n.chain;
  a.counters = n.counters;
  a.grad_scale = n.grad_scale;
  a.loss_scale = n.loss_scale;
  a.growth_tracker = n.growth_tracker;
  a.first = n.first;
  a.last = n.last;
  a.wide = n.wide;
  for (int64_t s = 0; s < n.n_slots; ++s) {
    a.slots[s] = {n.slots[s].param, n.slots[s].grad, n.slots[s].flags, n.first_chunk[s]};
  }
  using T = typename OpMath<scalar_t>::type;
  chunk_squares_kernel<scalar_t, SLOTS><<<chunks, kChunkThreads, 0, stream>>>(a);
  slot_norms_kernel<T, SLOTS><<<n.n_slots, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <typename scalar_t>
cudaError_t launch_lars_norms(const Norm& n, cudaStream_t stream) {
  return n.n_slots <= kFewSlots ? launch_lars_norms<scalar_t, kFewSlots>(n, stream)
                                : launch_lars_norms<scalar_t, kMaxSlots>(n, stream);
}

}  // namespace

cudaError_t lars_norms_cuda(const Norm& n, cudaStream_t stream) {
  switch (n.dtype) {
    case ScalarType::kFloat:
      return launch_lars_norms<float>(n, stream);
    case ScalarType::kDouble:
      return launch_lars_norms<double>(n, stream);
    case ScalarType::kHalf:
      return launch_lars_norms<__half>(n, stream);
    case ScalarType::kBFloat16:
      return launch_lars_norms<__nv_bfloat16>(n, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torch_renaissance
