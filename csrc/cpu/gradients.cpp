// SPDX-License-Identifier: BSD-3-Clause
// Passes over all gradients on the CPU: their norm, and copies into a contiguous plane.
#include <ATen/Parallel.h>

#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>

#include "../math/chain.h"
#include "kernels.h"
#include "values.h"

namespace torch_renaissance {
namespace {

struct Sums {
  double squares = 0, bad = 0;  // `bad` is NaN after a gradient that isn't finite
};

// Eight sums side by side, which the compiler turns into vectors; always in the same order.
template <typename grad_t, typename T>
Sums sums_of(const void* grad, int64_t count, T factor) {
  constexpr int kSums = 8;
  const auto from = static_cast<const memory_t<grad_t>*>(grad);
  T squares[kSums] = {}, bad[kSums] = {};
  const auto add = [&](int j, T value) {
    const T unscaled = value * factor;
    squares[j] += unscaled * unscaled;
    bad[j] += value * T(0);
  };
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int j = 0; j < kSums; ++j) add(j, static_cast<T>(Memory<grad_t>::load(from[i + j])));
  }
  for (; i < count; ++i) add(0, static_cast<T>(Memory<grad_t>::load(from[i])));
  Sums sums;
  for (int j = 0; j < kSums; ++j) {
    sums.squares += squares[j];
    sums.bad += bad[j];
  }
  return sums;
}

template <typename scalar_t>
Sums sums_of(const Slot& slot, const Chunk& chunk, double factor) {
  const auto at = [&](size_t size) {
    return static_cast<const char*>(slot.grad) + chunk.start * static_cast<int64_t>(size);
  };
  using T = opmath_t<scalar_t>;
  const T f = static_cast<T>(factor);
  if (slot.flags & kHalfGrad) return sums_of<c10::Half, T>(at(2), chunk.count, f);
  if (slot.flags & kBFloat16Grad) return sums_of<c10::BFloat16, T>(at(2), chunk.count, f);
  return sums_of<scalar_t, T>(at(sizeof(scalar_t)), chunk.count, f);
}

template <typename scalar_t>
void norm(const Norm& n) {
  const double factor =
      unscale_factor(n.control, n.grad_scale != nullptr ? n.grad_scale : n.loss_scale);
  Sums total{n.first ? 0.0 : n.chain[kSumOfSquares], n.first ? 0.0 : n.chain[kNonFinite]};
  for (int i = 0; i < n.n_segments; ++i) {
    const Segment& segment = n.segments[i];
    std::vector<Sums> found(segment.n_chunks);
    at::parallel_for(0, segment.n_chunks, 16, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const Chunk& chunk = segment.chunks[c];
        const Slot& slot = n.slots[segment.first_slot + chunk.slot];
        if (slot.grad != nullptr) found[c] = sums_of<scalar_t>(slot, chunk, factor);
      }
    });
    for (const Sums& s : found) {
      total.squares += s.squares;
      total.bad += s.bad;
    }
  }
  n.chain[kSumOfSquares] = total.squares;
  n.chain[kNonFinite] = total.bad;
  if (n.last) {
    finish_chain(
        n.control, total.squares, total.bad == 0, n.wide, n.loss_scale, n.growth_tracker, n.chain);
  }
}

template <typename scalar_t, typename grad_t>
void pack_span(void* plane, const void* grad, int64_t count, bool adds) {
  auto to = static_cast<memory_t<scalar_t>*>(plane);
  const auto from = static_cast<const memory_t<grad_t>*>(grad);
  if (std::is_same_v<scalar_t, grad_t> && !adds) {
    std::memcpy(plane, grad, count * sizeof(scalar_t));
    return;
  }
  using T = opmath_t<scalar_t>;
  for (int64_t i = 0; i < count; ++i) {
    T value = static_cast<T>(Memory<grad_t>::load(from[i]));
    if (adds) value = Memory<scalar_t>::load(to[i]) + value;
    to[i] = Memory<scalar_t>::save(value);
  }
}

template <typename scalar_t>
void pack(const Pack& p) {
  for (int i = 0; i < p.n_segments; ++i) {
    const Segment& segment = p.segments[i];
    at::parallel_for(0, segment.n_chunks, 16, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const Chunk& chunk = segment.chunks[c];
        const Slot& slot = p.slots[segment.first_slot + chunk.slot];
        auto to = static_cast<scalar_t*>(segment.planes[0]) + chunk.offset;
        const auto from = [&](size_t size) {
          return static_cast<const char*>(slot.grad) + chunk.start * static_cast<int64_t>(size);
        };
        if (chunk.count == 0) continue;
        if (slot.grad == nullptr) {
          if (!p.adds) std::memset(static_cast<void*>(to), 0, chunk.count * sizeof(scalar_t));
        } else if (slot.flags & kHalfGrad) {
          pack_span<scalar_t, c10::Half>(to, from(2), chunk.count, p.adds);
        } else if (slot.flags & kBFloat16Grad) {
          pack_span<scalar_t, c10::BFloat16>(to, from(2), chunk.count, p.adds);
        } else {
          pack_span<scalar_t, scalar_t>(to, from(sizeof(scalar_t)), chunk.count, p.adds);
        }
      }
    });
  }
}

}  // namespace

void norm_cpu(const Norm& n) {
  switch (n.dtype) {
    case ScalarType::kFloat:
      return norm<float>(n);
    case ScalarType::kDouble:
      return norm<double>(n);
    case ScalarType::kHalf:
      return norm<c10::Half>(n);
    case ScalarType::kBFloat16:
      return norm<c10::BFloat16>(n);
  }
}

void pack_cpu(const Pack& p) {
  switch (p.dtype) {
    case ScalarType::kFloat:
      return pack<float>(p);
    case ScalarType::kDouble:
      return pack<double>(p);
    case ScalarType::kHalf:
      return pack<c10::Half>(p);
    case ScalarType::kBFloat16:
      return pack<c10::BFloat16>(p);
  }
}

}  // namespace torch_renaissance
