// SPDX-License-Identifier: BSD-3-Clause
// The norms of each weight and gradient on the CPU, for LARS, and what norm_cpu finds besides.
#include <ATen/Parallel.h>

#include <cmath>

#include "../math/chain.h"
#include "kernels.h"
#include "values.h"

namespace torch_renaissance {
namespace {

// In double, no square of a normal fp32 leaves the range. Eight sums side by side, which the
// compiler turns into vectors; always in the same order.
template <typename from_t>
double squares_of(const void* values, int64_t start, int64_t count) {
  constexpr int kSums = 8;
  const auto from = static_cast<const memory_t<from_t>*>(values) + start;
  double squares[kSums] = {};
  const auto add = [&](int j, double value) { squares[j] += value * value; };
  int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int j = 0; j < kSums; ++j) add(j, static_cast<double>(Memory<from_t>::load(from[i + j])));
  }
  for (; i < count; ++i) add(0, static_cast<double>(Memory<from_t>::load(from[i])));
  double sum = 0;
  for (const double s : squares) sum += s;
  return sum;
}

template <typename scalar_t>
double squares_of_grad(const Slot& slot, const Chunk& chunk) {
  if (slot.flags & kHalfGrad) return squares_of<c10::Half>(slot.grad, chunk.start, chunk.count);
  if (slot.flags & kBFloat16Grad) {
    return squares_of<c10::BFloat16>(slot.grad, chunk.start, chunk.count);
  }
  return squares_of<scalar_t>(slot.grad, chunk.start, chunk.count);
}

// Fills the norms of the segment's slots; returns the sum of squares of all gradients.
template <typename scalar_t>
double norms_of(const Norm& n, const Segment& segment) {
  const auto squares = reinterpret_cast<ChunkSquares*>(segment.norms + segment.n_slots);
  at::parallel_for(0, segment.n_chunks, 16, [&](int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; ++c) {
      const Chunk& chunk = segment.chunks[c];
      const Slot& slot = n.slots[segment.first_slot + chunk.slot];
      squares[c] = {};
      if (slot.grad == nullptr) continue;
      squares[c] = {squares_of<scalar_t>(slot.param, chunk.start, chunk.count),
                    squares_of_grad<scalar_t>(slot, chunk)};
    }
  });
  double total = 0;
  int64_t c = 0;
  for (int32_t s = 0; s < segment.n_slots; ++s) {
    ChunkSquares sums{};
    for (; c < segment.n_chunks && segment.chunks[c].slot == s; ++c) {
      sums.weight += squares[c].weight;
      sums.grad += squares[c].grad;
    }
    segment.norms[s].weight = std::sqrt(sums.weight);
    segment.norms[s].grad = std::sqrt(sums.grad);
    total += sums.grad;
  }
  return total;
}

template <typename scalar_t>
void lars_norms(const Norm& n) {
  const double factor =
      unscale_factor(n.control, n.grad_scale != nullptr ? n.grad_scale : n.loss_scale);
  double total = 0;
  for (int i = 0; i < n.n_segments; ++i) total += norms_of<scalar_t>(n, n.segments[i]);
  total = total * factor * factor + (n.first ? 0.0 : n.chain[kSumOfSquares]);
  n.chain[kSumOfSquares] = total;
  if (n.last) {
    finish_chain(
        n.control, total, std::isfinite(total), n.wide, n.loss_scale, n.growth_tracker, n.chain);
  }
}

}  // namespace

void lars_norms_cpu(const Norm& n) {
  switch (n.dtype) {
    case ScalarType::kFloat:
      return lars_norms<float>(n);
    case ScalarType::kDouble:
      return lars_norms<double>(n);
    case ScalarType::kHalf:
      return lars_norms<c10::Half>(n);
    case ScalarType::kBFloat16:
      return lars_norms<c10::BFloat16>(n);
  }
}

}  // namespace torch_renaissance
