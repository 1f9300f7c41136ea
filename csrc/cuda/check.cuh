// SPDX-License-Identifier: BSD-3-Clause
// The norm pass within an update, for models whose chunks are all on the device at once.
//
// Note [Verdict]
// Every block reports on its chunk's gradient and then waits for all others, which a cooperative
// launch promises to run at the same time. The reports are added up in a fixed order: by every
// block where gradients are clipped, else by the first alone, since then a count of the blocks
// that saw a gradient which isn't finite is all that the others need.
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

inline constexpr int kBadBlock = 1 << 16;  // one in Counter::kArrived, above the blocks' number
static_assert(kNormPartials < kBadBlock);

// What the block's threads remember from its report to the verdict. The scale is read before
// anyone can have changed it.
struct Reported {
  float loss_scale;
  int32_t growth_tracker;
};

template <int THREADS, typename scalar_t, typename Arguments>
__device__ Reported report(const Arguments& a, const Slot& slot, const Chunk& chunk) {
  using T = typename OpMath<scalar_t>::type;
  __shared__ double shared[THREADS / 32];
  const Check& c = a.check;
  Reported found{1.0f, 0};
  if (c.loss_scale != nullptr) found = {*c.loss_scale, *c.growth_tracker};
  const float* scale = a.grad_scale;
  if (scale == nullptr && c.loss_scale != nullptr) scale = &found.loss_scale;
  Squares<T> squares;
  add_chunk<THREADS, scalar_t>(
      slot.grad, slot.flags, chunk, static_cast<T>(unscale_factor(a.control, scale)), squares);
  const double total = sum_of_block<THREADS>(squares.sum, shared);
  const bool bad = __syncthreads_or(squares.bad != T(0));
  if (threadIdx.x == 0) {
    c.partials[blockIdx.x] = total;
    __threadfence();
    atomicAdd(a.counters + kArrived, bad ? kBadBlock + 1 : 1);
  }
  return found;
}

// The chain's results for this launch, in shared memory; valid in thread 0.
template <int THREADS, typename Arguments>
__device__ const double* verdict(const Arguments& a, Reported mine) {
  __shared__ double shared[THREADS / 32], chain[kChainResults];
  __shared__ int arrived;
  const bool first = blockIdx.x == 0;
  if (threadIdx.x == 0) {
    do {
      arrived = *static_cast<volatile int32_t*>(a.counters + kArrived);
    } while (arrived % kBadBlock != static_cast<int>(gridDim.x));
    __threadfence();
  }
  const bool sums = first || !isinf(a.control[kMaxNorm]);
  double total = 0;
  if (sums) {
    __syncthreads();
    for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS)
      total += __ldcg(a.check.partials + i);
    total = sum_of_block<THREADS>(total, shared);
  }
  if (threadIdx.x == 0) {
    const Check& c = a.check;
    const bool bad = arrived >= kBadBlock;
    finish_chain(a.control,
                 total,
                 !bad,
                 false,
                 c.loss_scale != nullptr ? &mine.loss_scale : nullptr,
                 &mine.growth_tracker,
                 chain);
    if (first) {
      chain[kSumOfSquares] = total;
      chain[kNonFinite] = bad;
      for (int i = 0; i < kChainResults; ++i) c.chain[i] = chain[i];
      if (c.loss_scale != nullptr) {
        *c.loss_scale = mine.loss_scale;
        *c.growth_tracker = mine.growth_tracker;
      }
    }
  }
  return chain;
}

}  // namespace torch_renaissance
