// SPDX-License-Identifier: BSD-3-Clause
// The norm pass within an update, for models whose chunks are all on the device at once.
//
// Note [Verdict]
// Every block reports on its chunk's gradient and then waits for all others, which a cooperative
// launch promises to run at the same time. What the launch changes must have been read before the
// report, and is changed after the update. Reports are added up in a fixed order: by all blocks
// where gradients are clipped, else by the last alone (its chunk is the end of a tensor, so it has
// the least to do), since then a count of the blocks that saw a gradient which isn't finite is all
// that the others need. Two counters take turns, so that one can be cleared while blocks still look
// at the other.
#pragma once

#include "../math/chain.h"
#include "reduce.cuh"
#include "squares.cuh"

namespace torch_renaissance {

// What update.h's Norm has beyond an Update.
struct Check {
  double* chain;
  double* partials;
  float* loss_scale;
  int32_t* growth_tracker;
};

inline constexpr int kBadBlock = 1 << 16;  // one in a counter, above the blocks' number
static_assert(kNormPartials < kBadBlock);

__device__ __forceinline__ void add_and_release(int32_t* to, int32_t value) {
  asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}

__device__ __forceinline__ int32_t acquire(const int32_t* from) {
  int32_t value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}

__device__ __forceinline__ bool concludes() { return blockIdx.x == gridDim.x - 1; }

// What a block has read before its report.
struct Before {
  double unscale, max_norm;
  int32_t* arrived;
};

template <int THREADS, typename scalar_t, typename Arguments>
__device__ Before report(const Arguments& a, const Slot& slot, const Chunk& chunk) {
  using T = typename OpMath<scalar_t>::type;
  __shared__ double shared[THREADS / 32];
  const float* scale = a.grad_scale != nullptr ? a.grad_scale : a.check.loss_scale;
  const Before before{unscale_factor(a.control, scale),
                      a.control[kMaxNorm],
                      a.counters + kArrived + a.counters[kRound]};
  Squares<T> squares;
  add_chunk<THREADS, scalar_t>(
      slot.grad, slot.flags, chunk, static_cast<T>(before.unscale), squares);
  const double total = sum_of_block<THREADS>(squares.sum, shared);
  const bool bad = __syncthreads_or(squares.bad != T(0));
  if (threadIdx.x == 0) {
    a.check.partials[blockIdx.x] = total;
    add_and_release(before.arrived, bad ? kBadBlock + 1 : 1);
  }
  return before;
}

// Valid in thread 0.
template <int THREADS>
__device__ double sum_of_reports(const double* partials) {
  __shared__ double shared[THREADS / 32];
  double sum = 0;
  for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS) sum += __ldcg(partials + i);
  return sum_of_block<THREADS>(sum, shared);
}

// The multiplier of all gradients and whether one isn't finite; valid in thread 0.
struct Verdict {
  double multiplier;
  bool bad;
};

template <int THREADS, typename Arguments>
__device__ Verdict verdict(const Arguments& a, const Before& before) {
  int32_t arrived = 0;
  if (threadIdx.x == 0) {
    do arrived = acquire(before.arrived);
    while (arrived % kBadBlock != static_cast<int>(gridDim.x));
  }
  double norm = 0;
  if (!isinf(before.max_norm)) {
    __syncthreads();
    norm = std::sqrt(sum_of_reports<THREADS>(a.check.partials));
  }
  // By GradScaler's scale the update divides itself.
  const double unscale =
      a.grad_scale != nullptr ? unscale_factor(a.control, nullptr) : before.unscale;
  return {multiplier_of(unscale, before.max_norm, norm, false), arrived >= kBadBlock};
}

// By the block that concludes(), when its update is done.
template <int THREADS, typename Arguments>
__device__ void conclude(const Arguments& a, const Before& before, const Verdict& found) {
  const Check& c = a.check;
  const double sum = sum_of_reports<THREADS>(c.partials);
  if (threadIdx.x != 0) return;
  c.chain[kSumOfSquares] = sum;
  c.chain[kNonFinite] = found.bad;
  finish_chain(a.control, sum, !found.bad, false, c.loss_scale, c.growth_tracker, c.chain);
  const auto round = static_cast<int32_t>(before.arrived - (a.counters + kArrived));
  a.counters[kArrived + 1 - round] = 0;
  a.counters[kRound] = 1 - round;
}

}  // namespace torch_renaissance
