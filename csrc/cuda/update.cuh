// SPDX-License-Identifier: BSD-3-Clause
// The kernel of the optimizer update: one block a chunk, all groups and tensors in one launch.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../math/hyper.h"
#include "../update.h"

namespace torch_renaissance {

inline constexpr int kThreads = 256;
inline constexpr int kBlocksPerMultiprocessor = 6;  // occupancy hides what a block waits for

template <typename scalar_t>
struct OpMath {
  using type = float;
};
template <>
struct OpMath<double> {
  using type = double;
};

// The whole description travels by value, so nothing on the host has to outlive the launch.
template <int CAPACITY>
struct UpdateArguments {
  Segment segments[kMaxSegments];
  const double* hyper;
  int32_t* counters;
  const float* grad_scale;
  const float* found_inf;
  bool counts_skips;
  Slot slots[CAPACITY];
};

template <typename scalar_t>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(scalar_t);
  scalar_t value[kSize];
};

// The increment is always 1, but the compiler can't know: computing it needs `step`, so the counter
// has been read when the ticket is drawn. A fence would say the same and cost a microsecond.
__device__ __forceinline__ int draw_ticket(int32_t* ticket, double step) {
  return atomicAdd(ticket, __double_as_longlong(step) == 1 ? 2 : 1);
}

// See Note [Ticket]: advances the step counter of every slot that took part.
template <typename R, int CAPACITY>
__device__ void advance_steps(const UpdateArguments<CAPACITY>& a) {
  for (int i = 0; i < kMaxSegments && a.segments[i].n_slots > 0; ++i) {
    const Segment& segment = a.segments[i];
    for (int s = threadIdx.x; s < segment.n_slots; s += kThreads) {
      const Slot& slot = a.slots[segment.first_slot + s];
      if (slot.grad == nullptr) continue;
      if (R::counts(read_hyper(a.hyper + slot.row * kHyperColumns))) {
        segment.steps[s] += 1.0f;
      }
    }
  }
}

// One chunk's elements. PLAIN: the usual case of the rule, and no gradient scale.
template <typename R, int PLANES, bool PLAIN, typename scalar_t, typename T>
__device__ __forceinline__ void update_chunk(const typename R::template Scalars<T>& s,
                                             scalar_t* __restrict__ param,
                                             scalar_t* __restrict__ grad,
                                             scalar_t* const* planes,
                                             const float* grad_scale,
                                             int count) {
  using V = Vector<scalar_t>;
  constexpr int STATE = PLANES > 0 ? PLANES : 1;
  // Only a rule's last plane may be missing in some segments and present in others.
  auto has = [&](int p) { return p + 1 < R::kPlanes || planes[p] != nullptr; };
  auto update = [&](scalar_t& w, scalar_t& g, scalar_t(&state)[STATE]) {
    T gradient = static_cast<T>(g);
    if (!PLAIN && grad_scale != nullptr) {
      gradient = gradient / static_cast<T>(*grad_scale);
      g = static_cast<scalar_t>(gradient);
    }
    T element[kMaxPlanes] = {};
#pragma unroll
    for (int p = 0; p < PLANES; ++p) element[p] = static_cast<T>(state[p]);
    w = static_cast<scalar_t>(
        R::template update<PLAIN, T>(s, static_cast<T>(w), gradient, element));
#pragma unroll
    for (int p = 0; p < PLANES; ++p) state[p] = static_cast<scalar_t>(element[p]);
  };

  const bool aligned =
      ((reinterpret_cast<uintptr_t>(param) | reinterpret_cast<uintptr_t>(grad)) & 15) == 0;
  const int vectors = aligned ? count / V::kSize : 0;
#pragma unroll 1
  for (int i = threadIdx.x; i < vectors; i += kThreads) {
    V w = reinterpret_cast<V*>(param)[i];
    V g = reinterpret_cast<V*>(grad)[i];
    V state[STATE];
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
      state[p] = has(p) ? reinterpret_cast<V*>(planes[p])[i] : V{};
    }
#pragma unroll
    for (int j = 0; j < V::kSize; ++j) {
      scalar_t element[STATE];
#pragma unroll
      for (int p = 0; p < PLANES; ++p) element[p] = state[p].value[j];
      update(w.value[j], g.value[j], element);
#pragma unroll
      for (int p = 0; p < PLANES; ++p) state[p].value[j] = element[p];
    }
    reinterpret_cast<V*>(param)[i] = w;
    if (!PLAIN && grad_scale != nullptr) reinterpret_cast<V*>(grad)[i] = g;
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
      if (has(p)) reinterpret_cast<V*>(planes[p])[i] = state[p];
    }
  }
  // The tail, and tensors at odd addresses.
#pragma unroll 1
  for (int i = vectors * V::kSize + threadIdx.x; i < count; i += kThreads) {
    scalar_t w = param[i], g = grad[i], element[STATE];
#pragma unroll
    for (int p = 0; p < PLANES; ++p) element[p] = has(p) ? planes[p][i] : scalar_t(0.0f);
    update(w, g, element);
    param[i] = w;
    if (!PLAIN && grad_scale != nullptr) grad[i] = g;
#pragma unroll
    for (int p = 0; p < PLANES; ++p) {
      if (has(p)) planes[p][i] = element[p];
    }
  }
}

// PLANES: how many of the rule's state planes at least one segment has.
template <typename R, int PLANES, typename scalar_t, int CAPACITY>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    update_kernel(const __grid_constant__ UpdateArguments<CAPACITY> a) {
  using T = typename OpMath<scalar_t>::type;
  constexpr int STATE = PLANES > 0 ? PLANES : 1;

  int which = 0;
  int64_t block = blockIdx.x;
  while (block >= a.segments[which].n_chunks) block -= a.segments[which++].n_chunks;
  const Segment& segment = a.segments[which];
  const Chunk chunk = segment.chunks[block];
  const Slot& slot = a.slots[segment.first_slot + chunk.slot];

  __shared__ typename R::template Scalars<T> s;
  __shared__ bool skip, last;
  if (threadIdx.x == 0) {
    const Hyper h = read_hyper(a.hyper + slot.row * kHyperColumns);
    const double step = static_cast<double>(segment.steps[chunk.slot]) + 1;
    s = R::template scalars<T>(h, R::correction(h, step));
    skip = a.found_inf != nullptr && *a.found_inf != 0.0f;
    last = !skip && draw_ticket(a.counters + kTicket, step) == static_cast<int>(gridDim.x) - 1;
  }
  __syncthreads();
  if (skip) {
    if (a.counts_skips && blockIdx.x == 0 && threadIdx.x == 0) a.counters[kSkipped] += 1;
    return;
  }

  const int count = slot.grad != nullptr ? chunk.count : 0;
  auto param = static_cast<scalar_t*>(slot.param) + chunk.start;
  auto grad = static_cast<scalar_t*>(slot.grad) + chunk.start;
  scalar_t* planes[STATE];
#pragma unroll
  for (int p = 0; p < STATE; ++p) {
    auto plane = static_cast<scalar_t*>(segment.planes[p]);
    planes[p] = plane != nullptr ? plane + chunk.offset : nullptr;
  }
  if (s.plain && a.grad_scale == nullptr) {
    update_chunk<R, PLANES, true, scalar_t, T>(s, param, grad, planes, nullptr, count);
  } else {
    update_chunk<R, PLANES, false, scalar_t, T>(s, param, grad, planes, a.grad_scale, count);
  }
  if (last) {
    if (threadIdx.x == 0) a.counters[kTicket] = 0;
    advance_steps<R>(a);
  }
}

}  // namespace torch_renaissance
