// SPDX-License-Identifier: BSD-3-Clause
// The kernel of the optimizer update: one block a chunk, all groups and tensors in one launch.
#pragma once

#include <type_traits>

#include "../math/chain.h"
#include "../math/hyper.h"
#include "../math/lars.h"
#include "../math/lerp.h"
#include "check.cuh"

namespace torch_renaissance {

inline constexpr int kTinySlots = 16, kTinySegments = 2;  // an MLP

// The whole description travels by value, so nothing on the host has to outlive the launch.
template <int SLOTS, int SEGMENTS>
struct UpdateArguments {
  static constexpr bool kChecks = false;
  static constexpr int kSegments = SEGMENTS;
  // A small model's chunks then fit on the device all at once; large ones gain by wide blocks.
  static constexpr int kUpdateThreads = SLOTS == kTinySlots ? kThreads / 2 : kThreads;
  Segment segments[SEGMENTS];
  const double* hyper;
  int32_t* counters;
  const float* grad_scale;
  const float* found_inf;
  const double* control;
  const double* chain;
  bool counts_skips, ends_step;
  Slot slots[SLOTS];
};

// Of a launch that does the norm pass too: see Note [Verdict].
template <int SLOTS, int SEGMENTS>
struct CheckedArguments : UpdateArguments<SLOTS, SEGMENTS> {
  static constexpr bool kChecks = true;
  Check check;
};

// Occupancy hides what a block waits for; with extras, spilled registers would cost more.
template <typename Arguments, bool EXTRAS>
inline constexpr int kUpdateBlocks = (Arguments::kChecks ? 4
                                      : EXTRAS           ? 5
                                                         : 6) *
                                     kThreads / Arguments::kUpdateThreads;

// What a chunk's update does besides: see Update::control.
template <typename scalar_t>
struct Extras {
  scalar_t* ema;
  void* low;
  typename OpMath<scalar_t>::type ema_weight, multiplier;
  int flags;
  bool ema_first;  // the average begins as the weights after the first step, as AveragedModel's
};

template <typename T, typename scalar_t>
__device__ __forceinline__ scalar_t averaged(scalar_t ema,
                                             scalar_t param,
                                             const Extras<scalar_t>& x) {
  const T moved = lerp<T>(ema, param, x.ema_weight, x.ema_weight >= T(0.5));
  return x.ema_first ? param : static_cast<scalar_t>(moved);
}

// The increment is always 1, but the compiler can't know: computing it needs `step`, so the counter
// has been read when the ticket is drawn. A fence would say the same and cost a microsecond.
__device__ __forceinline__ int draw_ticket(int32_t* ticket, double step) {
  return atomicAdd(ticket, __double_as_longlong(step) == 1 ? 2 : 1);
}

// See Note [Ticket]: advances the step counter of every slot that took part.
template <typename R, typename Arguments>
__device__ void advance_steps(const Arguments& a) {
  for (int i = 0; i < Arguments::kSegments && a.segments[i].n_slots > 0; ++i) {
    const Segment& segment = a.segments[i];
    for (int s = threadIdx.x; s < segment.n_slots; s += Arguments::kUpdateThreads) {
      const Slot& slot = a.slots[segment.first_slot + s];
      if (slot.grad == nullptr) continue;
      if (R::counts(read_hyper(a.hyper + slot.row * kHyperColumns))) {
        segment.steps[s] += 1.0f;
      }
    }
  }
}

// LARS: from the norms of the slot, whose gradient the update unscales and clips by `multiplier`.
// The slot's first block keeps the ratio for whoever asks.
template <typename Arguments>
__device__ LarsRule::Correction lars_correction(const Arguments& a,
                                                const Hyper& h,
                                                const Chunk& chunk,
                                                SlotNorms& norms,
                                                bool keeps) {
  const double scale = a.grad_scale != nullptr ? *a.grad_scale : 1.0;
  const double multiplier = a.chain[kMultiplier] / scale;
  const LarsRule::Correction c =
      LarsRule::correction(h, norms.weight, norms.grad * std::fabs(multiplier));
  if (keeps && chunk.start == 0) norms.ratio = c.ratio;
  return c;
}

// Elements i * N to (i + 1) * N of a chunk. PLAIN: the usual case of the rule, no GradScaler.
template <typename R, int PLANES, bool PLAIN, bool EXTRAS, int N, typename scalar_t, typename T>
__device__ __forceinline__ void update_vector(const typename R::template Scalars<T>& s,
                                              scalar_t* __restrict__ param,
                                              void* __restrict__ grad,
                                              scalar_t* const* planes,
                                              const Extras<scalar_t>& x,
                                              const float* grad_scale,
                                              int i) {
  using V = Vector<scalar_t, N>;
  constexpr int STATE = PLANES > 0 ? PLANES : 1;
  // Only a rule's last plane may be missing in some segments and present in others.
  auto has = [&](int p) { return p + 1 < R::kPlanes || planes[p] != nullptr; };
  const int flags = EXTRAS ? x.flags : 0;
  V w = reinterpret_cast<V*>(param)[i];
  V g = load_grad<N, scalar_t>(grad, i, flags);
  V state[STATE];
#pragma unroll
  for (int p = 0; p < PLANES; ++p) {
    state[p] = has(p) ? reinterpret_cast<V*>(planes[p])[i] : V{};
  }
#pragma unroll
  for (int j = 0; j < N; ++j) {
    T gradient = static_cast<T>(g.value[j]);
    if (!PLAIN && grad_scale != nullptr) {
      gradient = gradient / static_cast<T>(*grad_scale);
      g.value[j] = static_cast<scalar_t>(gradient);
    }
    if (EXTRAS) gradient = gradient * x.multiplier;
    T element[kMaxPlanes] = {};
#pragma unroll
    for (int p = 0; p < PLANES; ++p) element[p] = static_cast<T>(state[p].value[j]);
    w.value[j] = static_cast<scalar_t>(
        R::template update<PLAIN, T>(s, static_cast<T>(w.value[j]), gradient, element));
#pragma unroll
    for (int p = 0; p < PLANES; ++p) state[p].value[j] = static_cast<scalar_t>(element[p]);
  }
  reinterpret_cast<V*>(param)[i] = w;
  if (!PLAIN && grad_scale != nullptr) save_grad(grad, i, flags, g);
#pragma unroll
  for (int p = 0; p < PLANES; ++p) {
    if (has(p)) reinterpret_cast<V*>(planes[p])[i] = state[p];
  }
  if (!EXTRAS) return;
  if (x.ema != nullptr) {  // loaded only now: registers are what bounds occupancy
    V average = reinterpret_cast<V*>(x.ema)[i];
#pragma unroll
    for (int j = 0; j < N; ++j) average.value[j] = averaged<T>(average.value[j], w.value[j], x);
    reinterpret_cast<V*>(x.ema)[i] = average;
  }
  if (flags & kWritesHalf) save_as<__half>(x.low, i, w);
  if (flags & kWritesBFloat16) save_as<__nv_bfloat16>(x.low, i, w);
}

template <typename R,
          int PLANES,
          bool PLAIN,
          bool EXTRAS,
          int THREADS,
          typename scalar_t,
          typename T>
__device__ __forceinline__ void update_chunk(const typename R::template Scalars<T>& s,
                                             scalar_t* param,
                                             void* grad,
                                             scalar_t* const* planes,
                                             const Extras<scalar_t>& x,
                                             const float* grad_scale,
                                             int count) {
  constexpr int N = Vector<scalar_t>::kSize;
  const bool aligned =
      ((reinterpret_cast<uintptr_t>(param) | reinterpret_cast<uintptr_t>(grad)) & 15) == 0;
  const int vectors = aligned ? count / N : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < vectors; i += THREADS) {
    update_vector<R, PLANES, PLAIN, EXTRAS, N, scalar_t, T>(
        s, param, grad, planes, x, grad_scale, i);
  }
  // The tail, and tensors at odd addresses.
#pragma unroll 1
  for (int i = vectors * N + threadIdx.x; i < count; i += THREADS) {
    update_vector<R, PLANES, PLAIN, EXTRAS, 1, scalar_t, T>(
        s, param, grad, planes, x, grad_scale, i);
  }
}

// A tensor without a gradient isn't updated, but the average goes on towards it.
template <int THREADS, typename scalar_t>
__device__ void average_chunk(const scalar_t* param, const Extras<scalar_t>& x, int count) {
  using T = typename OpMath<scalar_t>::type;
  for (int i = threadIdx.x; i < count; i += THREADS) x.ema[i] = averaged<T>(x.ema[i], param[i], x);
}

// PLANES: how many of the rule's state planes at least one segment has. EXTRAS: see
// Update::control.
template <typename R, int PLANES, bool EXTRAS, typename scalar_t, typename Arguments>
__global__ void __launch_bounds__(Arguments::kUpdateThreads, kUpdateBlocks<Arguments, EXTRAS>)
    update_kernel(const __grid_constant__ Arguments a) {
  constexpr int THREADS = Arguments::kUpdateThreads;
  constexpr bool CHECKS = Arguments::kChecks;
  using T = typename OpMath<scalar_t>::type;
  constexpr int STATE = PLANES > 0 ? PLANES : 1;

  int64_t block = blockIdx.x;
  const Segment& segment = a.segments[find_segment(a.segments, block)];
  const Chunk chunk = segment.chunks[block];
  const Slot& slot = a.slots[segment.first_slot + chunk.slot];

  __shared__ typename R::template Scalars<T> s;
  __shared__ Extras<scalar_t> x;
  __shared__ bool skip, last;
  Hyper h;
  double step = 0;
  int32_t averaged = 0;
  if (threadIdx.x == 0) {
    h = read_hyper(a.hyper + slot.row * kHyperColumns);
    step = static_cast<double>(segment.steps[chunk.slot]) + 1;
    if (EXTRAS) averaged = a.counters[kAveraged];
  }
  Before before;
  if constexpr (CHECKS) before = report<THREADS, scalar_t>(a, slot, chunk);
  if (threadIdx.x == 0) {
    if constexpr (!std::is_same_v<R, LarsRule>) {
      s = R::template scalars<T>(h, R::correction(h, step));
    }
  }
  Verdict found;
  if constexpr (CHECKS) found = verdict<THREADS>(a, before);
  if (threadIdx.x == 0) {
    skip = a.found_inf != nullptr && *a.found_inf != 0.0f;
    if constexpr (CHECKS) {
      skip = skip || skips(!found.bad, a.check.loss_scale);
    } else if (EXTRAS) {
      skip = skip || (a.chain != nullptr && a.chain[kFoundInf] != 0);
      found.multiplier =
          a.chain != nullptr ? a.chain[kMultiplier] : unscale_factor(a.control, nullptr);
    }
    if (EXTRAS) {
      if constexpr (std::is_same_v<R, LarsRule>) {
        SlotNorms& norms = segment.norms[chunk.slot];
        const bool keeps = !skip && slot.grad != nullptr;
        s = R::template scalars<T>(h, lars_correction(a, h, chunk, norms, keeps));
      }
      auto ema = static_cast<scalar_t*>(segment.ema);
      auto low = static_cast<uint16_t*>(segment.low);
      x = {ema != nullptr ? ema + chunk.offset : nullptr,
           low != nullptr ? low + chunk.offset : nullptr,
           static_cast<T>(1.0 - a.control[kEmaDecay]),
           static_cast<T>(found.multiplier),
           slot.flags,
           averaged == 0};
    }
    if constexpr (!CHECKS) {
      last = !skip &&
             draw_ticket(a.counters + kTicket, step + averaged) == static_cast<int>(gridDim.x) - 1;
    } else {
      last = concludes();
    }
  }
  __syncthreads();
  if (skip) {
    if (a.counts_skips && blockIdx.x == 0 && threadIdx.x == 0) a.counters[kSkipped] += 1;
    if constexpr (CHECKS) {
      if (last) conclude<THREADS>(a, before, found);
    }
    return;
  }

  const int count = slot.grad != nullptr ? chunk.count : 0;
  auto param = static_cast<scalar_t*>(slot.param) + chunk.start;
  auto grad =
      static_cast<char*>(slot.grad) + chunk.start * grad_bytes<scalar_t>(EXTRAS ? slot.flags : 0);
  scalar_t* planes[STATE];
#pragma unroll
  for (int p = 0; p < STATE; ++p) {
    auto plane = static_cast<scalar_t*>(segment.planes[p]);
    planes[p] = plane != nullptr ? plane + chunk.offset : nullptr;
  }
  if (s.plain && a.grad_scale == nullptr) {
    update_chunk<R, PLANES, true, EXTRAS, THREADS, scalar_t, T>(
        s, param, grad, planes, x, nullptr, count);
  } else {
    update_chunk<R, PLANES, false, EXTRAS, THREADS, scalar_t, T>(
        s, param, grad, planes, x, a.grad_scale, count);
  }
  if (EXTRAS && slot.grad == nullptr && slot.param != nullptr && x.ema != nullptr) {
    average_chunk<THREADS>(param, x, chunk.count);
  }
  if (!last) return;
  if constexpr (CHECKS) conclude<THREADS>(a, before, found);
  if (threadIdx.x == 0) {
    if (!CHECKS) a.counters[kTicket] = 0;
    if (EXTRAS && a.ends_step) a.counters[kAveraged] += 1;
  }
  advance_steps<R>(a);
}

}  // namespace torch_renaissance
