// SPDX-License-Identifier: BSD-3-Clause
// One read of all gradients: the sum of their squares and whether all are finite, added up in a
// fixed order; the last block finishes what the update needs (math/chain.h).
#include <algorithm>
#include <cstring>

#include "../math/chain.h"
#include "launch.h"
#include "reduce.cuh"
#include "squares.cuh"

namespace torch_renaissance {
namespace {

constexpr int kBlocksPerMultiprocessor = 8;

template <int SLOTS>
struct NormArguments {
  Segment segments[kMaxSegments];
  const double* control;
  double* chain;
  double* partials;
  int32_t* counters;
  const float* grad_scale;
  float* loss_scale;
  int32_t* growth_tracker;
  int64_t n_chunks;
  bool first, last, wide;
  struct {
    const void* grad;
    int32_t flags;
  } slots[SLOTS];
};

template <typename scalar_t, int SLOTS>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    norm_kernel(const __grid_constant__ NormArguments<SLOTS> a) {
  using T = typename OpMath<scalar_t>::type;
  __shared__ double shared[kThreads / 32];
  __shared__ bool last;
  const float* scale = a.grad_scale != nullptr ? a.grad_scale : a.loss_scale;
  const T factor = static_cast<T>(unscale_factor(a.control, scale));

  Squares<T> squares;
#pragma unroll 1
  for (int64_t c = blockIdx.x; c < a.n_chunks; c += gridDim.x) {
    int64_t block = c;
    const Segment& segment = a.segments[find_segment(a.segments, block)];
    const Chunk chunk = segment.chunks[block];
    const auto& slot = a.slots[segment.first_slot + chunk.slot];
    add_chunk<kThreads, scalar_t>(slot.grad, slot.flags, chunk, factor, squares);
  }
  double total = sum_of_block<kThreads>(squares.sum, shared);
  bool any_bad = __syncthreads_or(squares.bad != T(0));
  if (threadIdx.x == 0) {
    a.partials[blockIdx.x] = total;
    a.partials[kNormPartials + blockIdx.x] = any_bad;
    __threadfence();
    last = atomicAdd(a.counters + kTicket, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  double mine = 0, bad_blocks = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += kThreads) {
    mine += __ldcg(a.partials + i);
    bad_blocks += __ldcg(a.partials + kNormPartials + i);
  }
  total = sum_of_block<kThreads>(mine, shared);
  any_bad = __syncthreads_or(bad_blocks != 0);
  if (threadIdx.x == 0) {
    a.counters[kTicket] = 0;
    total += a.first ? 0.0 : a.chain[kSumOfSquares];
    any_bad = any_bad || (!a.first && a.chain[kNonFinite] != 0);
    a.chain[kSumOfSquares] = total;
    a.chain[kNonFinite] = any_bad;
    if (a.last) {
      finish_chain(a.control, total, !any_bad, a.wide, a.loss_scale, a.growth_tracker, a.chain);
    }
  }
}

template <typename scalar_t, int SLOTS>
cudaError_t launch_norm(const Norm& n, cudaStream_t stream) {
  NormArguments<SLOTS> a;
  a.n_chunks = 0;
  for (int i = 0; i < kMaxSegments; ++i) {
    a.segments[i] = i < n.n_segments ? n.segments[i] : Segment{};
    a.n_chunks += a.segments[i].n_chunks;
  }
  a.control = n.control;
  a.chain = n.chain;
  a.partials = n.partials;
  a.counters = n.counters;
  a.grad_scale = n.grad_scale;
  a.loss_scale = n.loss_scale;
  a.growth_tracker = n.growth_tracker;
  a.first = n.first;
  a.last = n.last;
  a.wide = n.wide;
  for (int64_t s = 0; s < n.n_slots; ++s) a.slots[s] = {n.slots[s].grad, n.slots[s].flags};
  const int64_t most = std::min(kBlocksPerMultiprocessor * multiprocessors(), kNormPartials);
  const auto blocks = static_cast<unsigned>(std::max<int64_t>(1, std::min(a.n_chunks, most)));
  norm_kernel<scalar_t, SLOTS><<<blocks, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <typename scalar_t>
cudaError_t launch_norm(const Norm& n, cudaStream_t stream) {
  return n.n_slots <= kFewSlots ? launch_norm<scalar_t, kFewSlots>(n, stream)
                                : launch_norm<scalar_t, kMaxSlots>(n, stream);
}

}  // namespace

cudaError_t norm_cuda(const Norm& n, cudaStream_t stream) {
  switch (n.dtype) {
    case ScalarType::kFloat:
      return launch_norm<float>(n, stream);
    case ScalarType::kDouble:
      return launch_norm<double>(n, stream);
    case ScalarType::kHalf:
      return launch_norm<__half>(n, stream);
    case ScalarType::kBFloat16:
      return launch_norm<__nv_bfloat16>(n, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torch_renaissance
