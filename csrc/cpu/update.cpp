// SPDX-License-Identifier: BSD-3-Clause
// The optimizer update on the CPU: loops over the formulas of math/, parallel over chunks.
#include "../update.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "../backend.h"
#include "../math/adam.h"
#include "../math/sgd.h"

// Builds each loop for processors with fused multiply-add as well, and picks at load time; the
// formulas say where to fuse, so all give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define TR_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define TR_VECTOR_CLONES __attribute__((target_clones("fma", "default")))
#endif
#else
#define TR_VECTOR_CLONES
#endif

namespace torch_renaissance {
namespace {

template <typename scalar_t>
struct OpMath {
  using type = float;
};
template <>
struct OpMath<double> {
  using type = double;
};
template <typename scalar_t>
using opmath_t = typename OpMath<scalar_t>::type;

// How a dtype lies in memory. The 16-bit ones are handled as integers: gcc vectorises no loop over
// their classes.
template <typename scalar_t>
struct Memory {
  using type = scalar_t;
  static scalar_t load(scalar_t v) { return v; }
  static scalar_t save(scalar_t v) { return v; }
};
template <>
struct Memory<c10::Half> {
  using type = uint16_t;
  // Exponents move by 112 between the formats. Every case is computed and one chosen, so that the
  // loop has no branches; a subnormal is shifted into place by adding or taking away a float.
  static float load(uint16_t v) {
    using namespace c10::detail;
    const uint32_t shifted = (v & 0x7fffu) << 13, sign = (v & 0x8000u) << 16;
    const uint32_t normal = shifted + 0x38000000u, special = shifted + 0x70000000u;
    const uint32_t small =
        fp32_to_bits(fp32_from_bits(shifted + 0x38800000u) - fp32_from_bits(0x38800000u));
    const uint32_t finite = shifted < 0x00800000u ? small : normal;
    return fp32_from_bits((shifted >= 0x0f800000u ? special : finite) | sign);
  }
  static uint16_t save(float v) {
    using namespace c10::detail;
    const uint32_t bits = fp32_to_bits(v), sign = bits & 0x80000000u, size = bits ^ sign;
    const uint32_t special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t small = fp32_to_bits(fp32_from_bits(size) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (size + 0xc8000fffu + ((size >> 13) & 1)) >> 13;  // to nearest even
    const uint32_t finite = size < 0x38800000u ? small : normal;
    const uint32_t chosen = size >= 0x47800000u ? special : finite;
    return static_cast<uint16_t>(chosen | sign >> 16);
  }
};
template <>
struct Memory<c10::BFloat16> {
  using type = uint16_t;
  static float load(uint16_t v) { return c10::detail::f32_from_bits(v); }
  static uint16_t save(float v) { return c10::detail::round_to_nearest_even(v); }
};
template <typename scalar_t>
using memory_t = typename Memory<scalar_t>::type;

#define TR_INLINE inline __attribute__((always_inline))

// PLANES: how many of the rule's state planes the segment has. PLAIN: the usual case, no scale.
template <typename R, int PLANES, bool PLAIN, typename T>
TR_INLINE void update_values(const typename R::template Scalars<T>& s,
                             T* __restrict__ param,
                             const T* __restrict__ grad,
                             T* __restrict__ plane0,
                             T* __restrict__ plane1,
                             T* __restrict__ plane2,
                             T grad_scale,
                             int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    T state[kMaxPlanes] = {};
    if constexpr (PLANES > 0) state[0] = plane0[i];
    if constexpr (PLANES > 1) state[1] = plane1[i];
    if constexpr (PLANES > 2) state[2] = plane2[i];
    T g = grad[i];
    if constexpr (!PLAIN) g = g / grad_scale;
    param[i] = R::template update<PLAIN, T>(s, param[i], g, state);
    if constexpr (PLANES > 0) plane0[i] = state[0];
    if constexpr (PLANES > 1) plane1[i] = state[1];
    if constexpr (PLANES > 2) plane2[i] = state[2];
  }
}

template <typename scalar_t>
TR_INLINE void load_values(float* __restrict__ to, const uint16_t* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Memory<scalar_t>::load(from[i]);
}

template <typename scalar_t>
TR_INLINE void save_values(uint16_t* __restrict__ to, const float* __restrict__ from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Memory<scalar_t>::save(from[i]);
}

// 16-bit values go through fp32 in pieces that stay in L1: gcc vectorises each loop alone, but not
// conversion and update in one.
template <typename R, int PLANES, bool PLAIN, typename scalar_t>
TR_INLINE void update_span(const typename R::template Scalars<opmath_t<scalar_t>>& s,
                           memory_t<scalar_t>* param,
                           memory_t<scalar_t>* grad,
                           memory_t<scalar_t>* const* planes,
                           opmath_t<scalar_t> grad_scale,
                           int64_t count) {
  if constexpr (sizeof(scalar_t) > sizeof(uint16_t)) {
    update_values<R, PLANES, PLAIN, scalar_t>(
        s, param, grad, planes[0], planes[1], planes[2], grad_scale, count);
  } else {
    constexpr int64_t kPiece = 256;
    float w[kPiece], g[kPiece], state[kMaxPlanes][kPiece];
    for (int64_t i = 0; i < count; i += kPiece) {
      const int64_t n = std::min(kPiece, count - i);
      load_values<scalar_t>(w, param + i, n);
      load_values<scalar_t>(g, grad + i, n);
      for (int p = 0; p < PLANES; ++p) load_values<scalar_t>(state[p], planes[p] + i, n);
      update_values<R, PLANES, PLAIN, float>(s, w, g, state[0], state[1], state[2], grad_scale, n);
      save_values<scalar_t>(param + i, w, n);
      for (int p = 0; p < PLANES; ++p) save_values<scalar_t>(planes[p] + i, state[p], n);
    }
  }
}

template <typename scalar_t>
void unscale_span(memory_t<scalar_t>* grad, opmath_t<scalar_t> grad_scale, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    grad[i] = Memory<scalar_t>::save(Memory<scalar_t>::load(grad[i]) / grad_scale);
  }
}

// target_clones takes functions, not templates: one per rule, number of planes and dtype.
#define TR_SPAN(NAME, RULE, PLANES, scalar_t)                                                \
  TR_VECTOR_CLONES void NAME(const RULE::Scalars<opmath_t<scalar_t>>& s,                     \
                             memory_t<scalar_t>* param,                                      \
                             memory_t<scalar_t>* grad,                                       \
                             memory_t<scalar_t>* const* planes,                              \
                             opmath_t<scalar_t> grad_scale,                                  \
                             int64_t count) {                                                \
    if (s.plain && grad_scale == 1) {                                                        \
      update_span<RULE, PLANES, true, scalar_t>(s, param, grad, planes, grad_scale, count);  \
    } else {                                                                                 \
      update_span<RULE, PLANES, false, scalar_t>(s, param, grad, planes, grad_scale, count); \
    }                                                                                        \
  }
#define TR_SPANS(RULE, PLANES, PREFIX)            \
  TR_SPAN(PREFIX##_float, RULE, PLANES, float)    \
  TR_SPAN(PREFIX##_double, RULE, PLANES, double)  \
  TR_SPAN(PREFIX##_half, RULE, PLANES, c10::Half) \
  TR_SPAN(PREFIX##_bfloat16, RULE, PLANES, c10::BFloat16)

TR_SPANS(AdamRule, 2, adam)
TR_SPANS(AdamRule, 3, amsgrad)
TR_SPANS(SgdRule, 0, sgd)
TR_SPANS(SgdRule, 1, momentum)

template <typename R, typename scalar_t>
using Span = void (*)(const typename R::template Scalars<opmath_t<scalar_t>>&,
                      memory_t<scalar_t>*,
                      memory_t<scalar_t>*,
                      memory_t<scalar_t>* const*,
                      opmath_t<scalar_t>,
                      int64_t);

// Elements worth a thread, as in torch's own loops.
constexpr int64_t kGrain = 32768;

struct Place {
  const Segment* segment;
  const Chunk* chunk;
};

template <typename R, typename scalar_t>
void update(const Update& u, Span<R, scalar_t> with_all_planes, Span<R, scalar_t> without_last) {
  using T = opmath_t<scalar_t>;
  const T grad_scale = u.grad_scale != nullptr ? static_cast<T>(*u.grad_scale) : T(1);
  std::vector<Place> places;
  for (int i = 0; i < u.n_segments; ++i) {
    const Segment& segment = u.segments[i];
    for (int64_t c = 0; c < segment.n_chunks; ++c) {
      const Chunk& chunk = segment.chunks[c];
      if (u.slots[segment.first_slot + chunk.slot].grad != nullptr) {
        places.push_back({&segment, &chunk});
      }
    }
  }
  const int64_t grain = kGrain * static_cast<int64_t>(sizeof(scalar_t)) / kChunkBytes;
  at::parallel_for(0, static_cast<int64_t>(places.size()), grain, [&](int64_t begin, int64_t end) {
    typename R::template Scalars<T> scalars{};
    const Slot* current = nullptr;
    for (int64_t i = begin; i < end; ++i) {
      const auto& [segment, chunk] = places[i];
      const Slot& slot = u.slots[segment->first_slot + chunk->slot];
      if (&slot != current) {
        const Hyper h = read_hyper(u.hyper + slot.row * kHyperColumns);
        scalars = R::template scalars<T>(h, R::correction(h, segment->steps[chunk->slot] + 1.0));
        current = &slot;
      }
      memory_t<scalar_t>* planes[kMaxPlanes];
      for (int p = 0; p < kMaxPlanes; ++p) {
        auto plane = static_cast<memory_t<scalar_t>*>(segment->planes[p]);
        planes[p] = plane != nullptr ? plane + chunk->offset : nullptr;
      }
      const auto span = planes[R::kPlanes - 1] != nullptr ? with_all_planes : without_last;
      auto grad = static_cast<memory_t<scalar_t>*>(slot.grad) + chunk->start;
      span(scalars,
           static_cast<memory_t<scalar_t>*>(slot.param) + chunk->start,
           grad,
           planes,
           grad_scale,
           chunk->count);
      if (u.grad_scale != nullptr) unscale_span<scalar_t>(grad, grad_scale, chunk->count);
    }
  });
  for (int i = 0; i < u.n_segments; ++i) {
    const Segment& segment = u.segments[i];
    for (int32_t s = 0; s < segment.n_slots; ++s) {
      const Slot& slot = u.slots[segment.first_slot + s];
      if (slot.grad == nullptr) continue;
      segment.steps[s] += R::counts(read_hyper(u.hyper + slot.row * kHyperColumns));
    }
  }
}

}  // namespace

void update_cpu(const Update& u) {
  if (u.found_inf != nullptr && *u.found_inf != 0) {
    u.counters[kSkipped] += u.counts_skips;
    return;
  }
  const bool adam = u.rule == Rule::kAdam;
  switch (u.dtype) {
    case ScalarType::kFloat:
      return adam ? update<AdamRule, float>(u, amsgrad_float, adam_float)
                  : update<SgdRule, float>(u, momentum_float, sgd_float);
    case ScalarType::kDouble:
      return adam ? update<AdamRule, double>(u, amsgrad_double, adam_double)
                  : update<SgdRule, double>(u, momentum_double, sgd_double);
    case ScalarType::kHalf:
      return adam ? update<AdamRule, c10::Half>(u, amsgrad_half, adam_half)
                  : update<SgdRule, c10::Half>(u, momentum_half, sgd_half);
    case ScalarType::kBFloat16:
      return adam ? update<AdamRule, c10::BFloat16>(u, amsgrad_bfloat16, adam_bfloat16)
                  : update<SgdRule, c10::BFloat16>(u, momentum_bfloat16, sgd_bfloat16);
  }
}

void pack_cpu(const Pack& p) {
  const auto size = static_cast<int64_t>(p.dtype == ScalarType::kDouble  ? 8
                                         : p.dtype == ScalarType::kFloat ? 4
                                                                         : 2);
  for (int i = 0; i < p.n_segments; ++i) {
    const Segment& segment = p.segments[i];
    at::parallel_for(0, segment.n_chunks, 16, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const Chunk& chunk = segment.chunks[c];
        auto to = static_cast<char*>(segment.planes[0]) + chunk.offset * size;
        auto from = static_cast<const char*>(p.slots[segment.first_slot + chunk.slot].grad);
        if (chunk.count == 0) continue;
        if (from != nullptr) {
          std::memcpy(to, from + chunk.start * size, chunk.count * size);
        } else {
          std::memset(to, 0, chunk.count * size);
        }
      }
    });
  }
}

namespace {

const bool registered = [] {
  cpu_backend.update = [](const Update& u, const at::Tensor&) { update_cpu(u); };
  cpu_backend.pack = [](const Pack& p, const at::Tensor&) { pack_cpu(p); };
  cpu_backend.write = [](double* to, at::ArrayRef<double> values, const at::Tensor&) {
    std::copy(values.begin(), values.end(), to);
  };
  cpu_backend.is_capturing = [] { return false; };
  return true;
}();

}  // namespace

}  // namespace torch_renaissance
