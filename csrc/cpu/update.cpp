// SPDX-License-Identifier: BSD-3-Clause
// The optimizer update on the CPU: loops over the formulas of math/, parallel over chunks.
#include "../update.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "../math/adam.h"
#include "../math/chain.h"
#include "../math/lars.h"
#include "../math/lerp.h"
#include "../math/sgd.h"
#include "kernels.h"
#include "values.h"

namespace torch_renaissance {
namespace {

// PLANES: how many of the rule's state planes the segment has. PLAIN: the usual case, no scale.
template <typename R, int PLANES, bool PLAIN, typename T>
TR_INLINE void update_values(const typename R::template Scalars<T>& s,
                             T* __restrict__ param,
                             const T* __restrict__ grad,
                             T* __restrict__ plane0,
                             T* __restrict__ plane1,
                             T* __restrict__ plane2,
                             T grad_scale,
                             T multiplier,
                             int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T state[kMaxPlanes] = {};
    if constexpr (PLANES > 0) state[0] = plane0[i];
    if constexpr (PLANES > 1) state[1] = plane1[i];
    if constexpr (PLANES > 2) state[2] = plane2[i];
    T g = grad[i];
    if constexpr (!PLAIN) g = g / grad_scale * multiplier;
    param[i] = R::template update<PLAIN, T>(s, param[i], g, state);
    if constexpr (PLANES > 0) plane0[i] = state[0];
    if constexpr (PLANES > 1) plane1[i] = state[1];
    if constexpr (PLANES > 2) plane2[i] = state[2];
  }
}

template <typename scalar_t>
void unscale_span(memory_t<scalar_t>* grad, opmath_t<scalar_t> grad_scale, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    grad[i] = Memory<scalar_t>::save(Memory<scalar_t>::load(grad[i]) / grad_scale);
  }
}

// target_clones takes functions, not templates: one per rule, number of planes and dtype.
#define TR_SPAN(NAME, RULE, PLANES, T)                                                     \
  TR_VECTOR_CLONES void NAME(const RULE::Scalars<T>& s,                                    \
                             T* param,                                                     \
                             T* grad,                                                      \
                             T* const* planes,                                             \
                             T grad_scale,                                                 \
                             T multiplier,                                                 \
                             int64_t count) {                                              \
    if (s.plain && grad_scale == 1 && multiplier == 1) {                                   \
      update_values<RULE, PLANES, true, T>(                                                \
          s, param, grad, planes[0], planes[1], planes[2], grad_scale, multiplier, count); \
    } else {                                                                               \
      update_values<RULE, PLANES, false, T>(                                               \
          s, param, grad, planes[0], planes[1], planes[2], grad_scale, multiplier, count); \
    }                                                                                      \
  }
#define TR_SPANS(RULE, PLANES, PREFIX)         \
  TR_SPAN(PREFIX##_float, RULE, PLANES, float) \
  TR_SPAN(PREFIX##_double, RULE, PLANES, double)

TR_SPANS(AdamRule, 2, adam)
TR_SPANS(AdamRule, 3, amsgrad)
TR_SPANS(SgdRule, 0, sgd)
TR_SPANS(SgdRule, 1, momentum)
TR_SPANS(LarsRule, 0, lars)
TR_SPANS(LarsRule, 1, lars_momentum)

template <typename R, typename T>
using Span = void (*)(const typename R::template Scalars<T>&, T*, T*, T* const*, T, T, int64_t);

// 16-bit values go through fp32 in pieces that stay in L1: gcc vectorises each loop alone, but not
// conversion and update in one.
template <typename R, typename scalar_t>
void update_span(Span<R, opmath_t<scalar_t>> span,
                 const typename R::template Scalars<opmath_t<scalar_t>>& s,
                 memory_t<scalar_t>* param,
                 memory_t<scalar_t>* grad,
                 memory_t<scalar_t>* const* planes,
                 opmath_t<scalar_t> grad_scale,
                 opmath_t<scalar_t> multiplier,
                 int64_t count) {
  if constexpr (sizeof(scalar_t) > sizeof(uint16_t)) {
    span(s, param, grad, planes, grad_scale, multiplier, count);
  } else {
    constexpr int64_t kPiece = 256;
    float w[kPiece], g[kPiece], state[kMaxPlanes][kPiece];
    float* const pieces[kMaxPlanes] = {state[0], state[1], state[2]};
    for (int64_t i = 0; i < count; i += kPiece) {
      const int64_t n = std::min(kPiece, count - i);
      load_values<scalar_t>(w, param + i, n);
      load_values<scalar_t>(g, grad + i, n);
      for (int p = 0; p < R::kPlanes; ++p) {
        if (planes[p] != nullptr) load_values<scalar_t>(state[p], planes[p] + i, n);
      }
      span(s, w, g, pieces, grad_scale, multiplier, n);
      save_values<scalar_t>(param + i, w, n);
      for (int p = 0; p < R::kPlanes; ++p) {
        if (planes[p] != nullptr) save_values<scalar_t>(planes[p] + i, state[p], n);
      }
    }
  }
}

// Elements worth a thread, as in torch's own loops.
constexpr int64_t kGrain = 32768;

struct Place {
  const Segment* segment;
  const Chunk* chunk;
};

// What goes with an update besides: see Update::control.
template <typename scalar_t>
struct Extras {
  using T = opmath_t<scalar_t>;
  using M = memory_t<scalar_t>;

  const Update& u;
  T multiplier = 1, ema_weight = 0;
  bool ema_first = false;

  explicit Extras(const Update& update) : u(update) {
    if (u.control == nullptr) return;
    multiplier = static_cast<T>(u.chain != nullptr ? u.chain[kMultiplier]
                                                   : unscale_factor(u.control, nullptr));
    ema_weight = static_cast<T>(1.0 - u.control[kEmaDecay]);
    ema_first = u.counters[kAveraged] == 0;
  }

  // A 16-bit gradient of a float32 parameter, as float32 in `buffer`.
  static M* widened(const Slot& slot, const Chunk& chunk, M* buffer) {
    if constexpr (std::is_same_v<scalar_t, float>) {
      const auto from = static_cast<const uint16_t*>(slot.grad) + chunk.start;
      if (slot.flags & kHalfGrad) load_values<c10::Half>(buffer, from, chunk.count);
      if (slot.flags & kBFloat16Grad) load_values<c10::BFloat16>(buffer, from, chunk.count);
      if (slot.flags & (kHalfGrad | kBFloat16Grad)) return buffer;
    }
    return static_cast<M*>(slot.grad) + chunk.start;
  }

  static void unscale(const Slot& slot, const Chunk& chunk, T grad_scale) {
    if (slot.flags & kHalfGrad) {
      return unscale_span<c10::Half>(
          static_cast<uint16_t*>(slot.grad) + chunk.start, grad_scale, chunk.count);
    }
    if (slot.flags & kBFloat16Grad) {
      return unscale_span<c10::BFloat16>(
          static_cast<uint16_t*>(slot.grad) + chunk.start, grad_scale, chunk.count);
    }
    unscale_span<scalar_t>(static_cast<M*>(slot.grad) + chunk.start, grad_scale, chunk.count);
  }

  // After the update of the chunk: the average and the 16-bit copy.
  void finish(const Slot& slot, const Segment& segment, const Chunk& chunk) const {
    const M* param = static_cast<const M*>(slot.param) + chunk.start;
    if (segment.ema != nullptr) {
      M* ema = static_cast<M*>(segment.ema) + chunk.offset;
      for (int32_t i = 0; i < chunk.count; ++i) {
        const T w = Memory<scalar_t>::load(param[i]), average = Memory<scalar_t>::load(ema[i]);
        const T moved = lerp<T>(average, w, ema_weight, ema_weight >= T(0.5));
        ema[i] = ema_first ? param[i] : Memory<scalar_t>::save(moved);
      }
    }
    if constexpr (std::is_same_v<scalar_t, float>) {
      uint16_t* low = static_cast<uint16_t*>(segment.low) + chunk.offset;
      if (slot.grad == nullptr) return;
      if (slot.flags & kWritesHalf) save_values<c10::Half>(low, param, chunk.count);
      if (slot.flags & kWritesBFloat16) save_values<c10::BFloat16>(low, param, chunk.count);
    }
  }
};

// Of one slot; LARS keeps the ratio for whoever asks.
template <typename R>
typename R::Correction correction(const Update& u,
                                  const Segment& segment,
                                  int32_t slot,
                                  const Hyper& h) {
  if constexpr (std::is_same_v<R, LarsRule>) {
    const double scale = u.grad_scale != nullptr ? *u.grad_scale : 1.0;
    const double multiplier = u.chain[kMultiplier] / scale;
    const SlotNorms& n = segment.norms[slot];
    return R::correction(h, n.weight, n.grad * std::fabs(multiplier));
  } else {
    return R::correction(h, segment.steps[slot] + 1.0);
  }
}

template <typename R, typename scalar_t>
void update(const Update& u,
            Span<R, opmath_t<scalar_t>> with_all_planes,
            Span<R, opmath_t<scalar_t>> without_last) {
  using T = opmath_t<scalar_t>;
  const T grad_scale = u.grad_scale != nullptr ? static_cast<T>(*u.grad_scale) : T(1);
  const Extras<scalar_t> extras(u);
  std::vector<Place> places;
  for (int i = 0; i < u.n_segments; ++i) {
    const Segment& segment = u.segments[i];
    for (int64_t c = 0; c < segment.n_chunks; ++c) {
      const Chunk& chunk = segment.chunks[c];
      const Slot& slot = u.slots[segment.first_slot + chunk.slot];
      const bool averages = u.control != nullptr && segment.ema != nullptr && slot.param != nullptr;
      if (slot.grad != nullptr || averages) places.push_back({&segment, &chunk});
    }
  }
  const int64_t grain = kGrain * static_cast<int64_t>(sizeof(scalar_t)) / kChunkBytes;
  at::parallel_for(0, static_cast<int64_t>(places.size()), grain, [&](int64_t begin, int64_t end) {
    typename R::template Scalars<T> scalars{};
    const Slot* current = nullptr;
    memory_t<scalar_t> buffer[kChunkBytes / sizeof(scalar_t)];
    for (int64_t i = begin; i < end; ++i) {
      const auto& [segment, chunk] = places[i];
      const Slot& slot = u.slots[segment->first_slot + chunk->slot];
      if (&slot != current) {
        const Hyper h = read_hyper(u.hyper + slot.row * kHyperColumns);
        scalars = R::template scalars<T>(h, correction<R>(u, *segment, chunk->slot, h));
        current = &slot;
      }
      memory_t<scalar_t>* planes[kMaxPlanes];
      for (int p = 0; p < kMaxPlanes; ++p) {
        auto plane = static_cast<memory_t<scalar_t>*>(segment->planes[p]);
        planes[p] = plane != nullptr ? plane + chunk->offset : nullptr;
      }
      const auto span = planes[R::kPlanes - 1] != nullptr ? with_all_planes : without_last;
      if (slot.grad != nullptr) {
        update_span<R, scalar_t>(span,
                                 scalars,
                                 static_cast<memory_t<scalar_t>*>(slot.param) + chunk->start,
                                 extras.widened(slot, *chunk, buffer),
                                 planes,
                                 grad_scale,
                                 extras.multiplier,
                                 chunk->count);
        if (u.grad_scale != nullptr) extras.unscale(slot, *chunk, grad_scale);
      }
      if (u.control != nullptr) extras.finish(slot, *segment, *chunk);
    }
  });
  for (int i = 0; i < u.n_segments; ++i) {
    const Segment& segment = u.segments[i];
    for (int32_t s = 0; s < segment.n_slots; ++s) {
      const Slot& slot = u.slots[segment.first_slot + s];
      if (slot.grad == nullptr) continue;
      const Hyper h = read_hyper(u.hyper + slot.row * kHyperColumns);
      if constexpr (std::is_same_v<R, LarsRule>) {
        segment.norms[s].ratio = correction<R>(u, segment, s, h).ratio;
      }
      segment.steps[s] += R::counts(h);
    }
  }
}

#define TR_UPDATE(NAME, RULE, WITH_ALL_PLANES, WITHOUT_LAST)                                  \
  void NAME(const Update& u) {                                                                \
    switch (u.dtype) {                                                                        \
      case ScalarType::kFloat:                                                                \
        return update<RULE, float>(u, WITH_ALL_PLANES##_float, WITHOUT_LAST##_float);         \
      case ScalarType::kDouble:                                                               \
        return update<RULE, double>(u, WITH_ALL_PLANES##_double, WITHOUT_LAST##_double);      \
      case ScalarType::kHalf:                                                                 \
        return update<RULE, c10::Half>(u, WITH_ALL_PLANES##_float, WITHOUT_LAST##_float);     \
      case ScalarType::kBFloat16:                                                             \
        return update<RULE, c10::BFloat16>(u, WITH_ALL_PLANES##_float, WITHOUT_LAST##_float); \
    }                                                                                         \
  }
TR_UPDATE(update_adam, AdamRule, amsgrad, adam)
TR_UPDATE(update_sgd, SgdRule, momentum, sgd)
TR_UPDATE(update_lars, LarsRule, lars_momentum, lars)

}  // namespace

void update_cpu(const Update& u) {
  const bool non_finite = u.chain != nullptr && u.chain[kFoundInf] != 0;
  if (non_finite || (u.found_inf != nullptr && *u.found_inf != 0)) {
    u.counters[kSkipped] += u.counts_skips;
    return;
  }
  switch (u.rule) {
    case Rule::kSgd:
      update_sgd(u);
      break;
    case Rule::kAdam:
      update_adam(u);
      break;
    case Rule::kLars:
      update_lars(u);
      break;
  }
  if (u.control != nullptr && u.ends_step) u.counters[kAveraged] += 1;
}

}  // namespace torch_renaissance
