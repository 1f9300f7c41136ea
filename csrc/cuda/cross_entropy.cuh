// SPDX-License-Identifier: BSD-3-Clause
// The kernels of the cross entropy: forward reads the logits once, backward reads them once more
// and writes the gradient.
#pragma once

#undef NDEBUG  // as torch's kernels, which look at labels in any build
#include <cassert>

#include "../math/cross_entropy.h"
#include "cross_entropy.h"
#include "logit_rows.cuh"

namespace torch_renaissance {

// Note [One launch]
// The mean needs every block's sum. Each block writes its own and takes a ticket; whoever draws the
// last one adds all of them up, in a fixed order, and puts the ticket back to zero for the next
// launch. So launches may share a ticket only if no two can run at the same time, as those of one
// stream; each captured one has a ticket of its own, since its graph may be replayed anywhere.
__device__ int32_t tickets[kTickets];

// In double, since millions of rows may be added up.
struct Sums {
  double loss, weight;
};

__device__ __forceinline__ void add_lanes(Sums& sums) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    sums.loss += __shfl_xor_sync(kWholeWarp, sums.loss, offset);
    sums.weight += __shfl_xor_sync(kWholeWarp, sums.weight, offset);
  }
}

// The sums of all threads, in thread 0, in an order that depends on the block's size only.
template <int THREADS>
__device__ Sums add_threads(Sums sums) {
  constexpr int WARPS = THREADS / 32;
  __shared__ Sums of_warp[WARPS];
  add_lanes(sums);
  __syncthreads();  // nobody reads what an earlier call left
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sums;
  __syncthreads();
  if (threadIdx.x < 32) {
    sums = threadIdx.x < WARPS ? of_warp[threadIdx.x] : Sums{};
    add_lanes(sums);
  }
  return sums;
}

// -- Forward ------------------------------------------------------------------------------------

__device__ inline int64_t offset_of(const CrossEntropy& c,
                                    const LogitStrides& strides,
                                    int64_t row) {
  if (c.n_positions == 1) return row * strides.sample;
  return row / c.n_positions * strides.sample + row % c.n_positions * strides.position;
}

template <typename scalar_t, typename T>
__device__ void store_loss(const CrossEntropy& c, int64_t i, T loss) {
  if (c.wide_loss) {
    static_cast<T*>(c.loss)[i] = loss;
  } else {
    static_cast<scalar_t*>(c.loss)[i] = static_cast<scalar_t>(loss);
  }
}

template <typename T>
__device__ Shares<T> shares_of(const CrossEntropy& c) {
  return {static_cast<T>(c.target_share), static_cast<T>(c.uniform_share)};
}

// What row `row` adds to the loss and to the mean's divisor.
template <typename scalar_t, typename T>
__device__ Sums finish_row(const CrossEntropy& c,
                           int64_t row,
                           int64_t target,
                           const RowSums<T>& sums,
                           T target_logit) {
  const Label label = classify(target, c.ignore_index, c.n_classes);
  Sums result{};
  T max = 0, log_sum = 0;
  if (label == Label::kOutOfBounds) {
    assert(!c.asserts_labels && "a target is in [0, n_classes) or ignore_index");
    result = {NAN, 1.0};
  } else if (label == Label::kValid) {
    max = sums.max;
    log_sum = std::log(sums.sum);
    const T weight = c.weight != nullptr ? static_cast<const T*>(c.weight)[target] : T(1);
    result = {row_loss(sums, log_sum, target_logit, weight, shares_of<T>(c)), weight};
  }
  auto saved = static_cast<T*>(c.saved) + 2 * row;
  saved[0] = max;
  saved[1] = log_sum;
  if (c.reduction == Reduction::kNone) store_loss<scalar_t>(c, row, static_cast<T>(result.loss));
  return result;
}

// See Note [One launch]. True in every thread of the block that has all blocks' sums, in thread 0.
template <int THREADS>
__device__ bool add_blocks(const CrossEntropyScratch& scratch, Sums& sums) {
  sums = add_threads<THREADS>(sums);
  if (gridDim.x == 1) return true;
  const auto partial = reinterpret_cast<Sums*>(scratch.partial_sums);
  int32_t* ticket = scratch.ticket != nullptr ? scratch.ticket : tickets + scratch.ticket_number;
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = sums;
    __threadfence();
    last = atomicAdd(ticket, 1) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (!last) return false;
  __threadfence();
  sums = {};
  for (unsigned i = threadIdx.x; i < gridDim.x; i += THREADS) {
    sums.loss += __ldcg(&partial[i].loss);
    sums.weight += __ldcg(&partial[i].weight);
  }
  sums = add_threads<THREADS>(sums);
  if (threadIdx.x == 0) *ticket = 0;
  return true;
}

template <typename P, bool SMOOTH, typename scalar_t>
__global__ void __launch_bounds__(P::kThreads, P::kBlocks)
    cross_entropy_forward_kernel(const __grid_constant__ CrossEntropy c,
                                 const CrossEntropyScratch scratch) {
  using T = typename OpMath<scalar_t>::type;
  constexpr int ROWS = P::kThreads / P::kGroup;
  const auto input = static_cast<const scalar_t*>(c.input);
  Sums total{};
#pragma unroll 1
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * ROWS; first < c.n_rows;
       first += static_cast<int64_t>(gridDim.x) * ROWS) {
    const int64_t row = first + P::row();
    const bool inside = row < c.n_rows;
    const int64_t target = inside ? c.target[row] : c.ignore_index;
    const scalar_t* logits = input + offset_of(c, c.input_strides, row);
    const bool valid = classify(target, c.ignore_index, c.n_classes) == Label::kValid;
    RowSums<T> sums = RowSums<T>::empty();
    if (P::kSkips ? valid : inside) P::template read<SMOOTH>(sums, c, logits);
    // Not before, so that nothing waits for the label.
    const T target_logit = valid ? static_cast<T>(logits[target * c.input_strides.n_class]) : T(0);
    if (!P::kSkips || valid) P::template combine<SMOOTH>(sums);
    if (inside && P::lane() == 0) {
      const Sums result = finish_row<scalar_t>(c, row, target, sums, target_logit);
      total.loss += result.loss;
      total.weight += result.weight;
    }
  }

  auto totals = static_cast<T*>(c.saved) + 2 * c.n_rows;
  if (blockIdx.x == 0) {
    Sums weights{};
    if (SMOOTH && c.weight != nullptr) {
      for (int64_t i = threadIdx.x; i < c.n_classes; i += P::kThreads) {
        weights.weight += static_cast<const T*>(c.weight)[i];
      }
      weights = add_threads<P::kThreads>(weights);
    } else {
      weights.weight = static_cast<double>(c.n_classes);
    }
    if (threadIdx.x == 0) {
      totals[1] = static_cast<T>(weights.weight);
      if (c.reduction == Reduction::kNone) totals[0] = T(1);
    }
  }
  if (c.reduction == Reduction::kNone || !add_blocks<P::kThreads>(scratch, total)) return;
  if (threadIdx.x == 0) {
    const bool mean = c.reduction == Reduction::kMean;
    const double loss = mean ? total.loss / total.weight : total.loss;
    store_loss<scalar_t>(c, 0, static_cast<T>(loss));
    totals[0] = static_cast<T>(total.weight);
  }
}

// -- Backward -----------------------------------------------------------------------------------

// The gradient of one row's logits. Rows without one are constant: zero, or NaN for a bad label.
template <typename scalar_t, typename T>
struct RowWriter {
  RowGradient<T> gradient;
  const T* weight;  // null where all classes' are one
  int64_t target;
  bool constant;
  scalar_t value;

  static __device__ RowWriter of(const CrossEntropy& c, int64_t row) {
    const auto saved = static_cast<const T*>(c.saved);
    const T *stats = saved + 2 * row, *totals = saved + 2 * c.n_rows;
    const int64_t target = c.target[row];
    const Label label = classify(target, c.ignore_index, c.n_classes);
    const int64_t i = row * c.grad_loss_stride;
    T scale = c.wide_loss ? static_cast<const T*>(c.grad_loss)[i]
                          : static_cast<T>(static_cast<const scalar_t*>(c.grad_loss)[i]);
    if (c.reduction == Reduction::kMean) scale = scale / totals[0];
    const auto weight = static_cast<const T*>(c.weight);
    const T target_weight = weight != nullptr && label == Label::kValid ? weight[target] : T(1);
    const auto gradient =
        RowGradient<T>::of(stats[0], stats[1], scale, target_weight, totals[1], shares_of<T>(c));
    const bool bad = label == Label::kOutOfBounds;
    return {gradient,
            gradient.uniform == 0 ? nullptr : weight,
            target,
            label != Label::kValid,
            static_cast<scalar_t>(bad ? static_cast<T>(NAN) : T(0))};
  }

  __device__ T at(scalar_t x, int n) const {
    return gradient.at(static_cast<T>(x), weight != nullptr ? weight[n] : T(1));
  }
  __device__ scalar_t one(scalar_t x, int n) const {
    if (constant) return value;
    const T g = at(x, n);
    return static_cast<scalar_t>(n == target ? g - gradient.target : g);
  }
  __device__ void vector(Vector<scalar_t>& x, int first) const {
    constexpr int SIZE = Vector<scalar_t>::kSize;
    if (constant) {
#pragma unroll
      for (int k = 0; k < SIZE; ++k) x.value[k] = value;
      return;
    }
    T g[SIZE];
#pragma unroll
    for (int k = 0; k < SIZE; ++k) g[k] = at(x.value[k], first + k);
    const int64_t place = target - first;
    if (place >= 0 && place < SIZE) {
#pragma unroll
      for (int k = 0; k < SIZE; ++k) g[k] = k == place ? g[k] - gradient.target : g[k];
    }
#pragma unroll
    for (int k = 0; k < SIZE; ++k) x.value[k] = static_cast<scalar_t>(g[k]);
  }
};

template <typename P, typename scalar_t>
__global__ void __launch_bounds__(P::kThreads, P::kBlocks)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropy c) {
  using T = typename OpMath<scalar_t>::type;
  constexpr int ROWS = P::kThreads / P::kGroup;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * ROWS + P::row();
  if (row >= c.n_rows) return;
  const scalar_t* x = static_cast<const scalar_t*>(c.input) + offset_of(c, c.input_strides, row);
  scalar_t* grad = static_cast<scalar_t*>(c.grad) + offset_of(c, c.grad_strides, row);
  P::template write<RowWriter<scalar_t, T>>(c, row, x, grad);
}

}  // namespace torch_renaissance
