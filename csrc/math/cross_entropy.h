// SPDX-License-Identifier: BSD-3-Clause
// Cross entropy of a row of logits, with class weights and label smoothing (arXiv:1512.00567), as
// torch.nn.functional.cross_entropy defines it, and its gradient.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "host_device.h"

namespace torch_renaissance {

// e^x for x <= 0. On the CPU fp32 is plain arithmetic, 2^k times a Taylor polynomial (its first
// term left out is below 6e-9), so that a loop over it is vectorised.
TR_HOST_DEVICE double exponential(double x) { return std::exp(x); }
TR_HOST_DEVICE float exponential(float x) {
#ifdef __CUDA_ARCH__
  return std::exp(x);
#else
  constexpr float kLowest = -105.0f;       // e^x rounds to 0 below
  constexpr float kRounder = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  constexpr int32_t kRounderBits = 0x4b400000;
  constexpr float kLog2e = 1.44269504f;  // ln 2 in two parts: k * kLn2High is exact
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;
  x = x < kLowest ? kLowest : x;  // a NaN stays
  const float rounded = std::fma(x, kLog2e, kRounder), k = rounded - kRounder;
  const float r = std::fma(-k, kLn2Low, std::fma(-k, kLn2High, x));
  float p = 1.0f / 5040;
  p = std::fma(p, r, 1.0f / 720);
  p = std::fma(p, r, 1.0f / 120);
  p = std::fma(p, r, 1.0f / 24);
  p = std::fma(p, r, 1.0f / 6);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  // 2^k in two factors, since results may be subnormal.
  int32_t exponent;
  std::memcpy(&exponent, &rounded, sizeof(exponent));
  exponent -= kRounderBits;
  const int32_t half = exponent >> 1;
  const uint32_t bits1 = static_cast<uint32_t>(half + 127) << 23;
  const uint32_t bits2 = static_cast<uint32_t>(exponent - half + 127) << 23;
  float factor1, factor2;
  std::memcpy(&factor1, &bits1, sizeof(factor1));
  std::memcpy(&factor2, &bits2, sizeof(factor2));
  return p * factor1 * factor2;
#endif
}

// The same for a term of a sum. Of 16-bit logits, whose loss and gradient are rounded more coarsely
// anyway, a GPU takes 2 or 3 units in the last place for half the instructions.
template <typename scalar_t, typename T>
TR_HOST_DEVICE T exponential_of(T x) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(scalar_t) < sizeof(float)) return std::exp2(x * T(1.44269504));
#endif
  return exponential(x);
}

// The row's logits summed up in any order and in parts, measured from the largest one so far.
template <typename T>
struct RowSums {
  T max;
  T sum;       // of e^(x - max)
  T weight;    // of class weights w; this and the next only if there is label smoothing
  T weighted;  // of w * (x - max)

  static TR_HOST_DEVICE RowSums empty() { return {-T(INFINITY), T(0), T(0), T(0)}; }

  // Masked classes have logits of -inf, from which nothing can be measured.
  static TR_HOST_DEVICE T reference(T max) { return max == -T(INFINITY) ? T(0) : max; }

  TR_HOST_DEVICE void raise_max(T to) {
    if (!(to > max)) return;
    const T shift = reference(max) - to;
    if (max != -T(INFINITY)) sum = sum * exponential(shift);
    weighted = std::fma(weight, shift, weighted);
    max = to;
  }

  TR_HOST_DEVICE void merge(RowSums other) {
    raise_max(other.max);
    other.raise_max(max);
    sum += other.sum;
    weight += other.weight;
    weighted += other.weighted;
  }
};

enum class Label { kValid, kIgnored, kOutOfBounds };

TR_HOST_DEVICE Label classify(int64_t target, int64_t ignore_index, int64_t n_classes) {
  if (target == ignore_index) return Label::kIgnored;
  return target >= 0 && target < n_classes ? Label::kValid : Label::kOutOfBounds;
}

// How much of a row's loss each part is: 1 - label_smoothing, and label_smoothing / n_classes.
template <typename T>
struct Shares {
  T target, uniform;
};

// From log p = (x - max) - log_sum: neither part alone is as exact as max and log_sum kept apart.
template <typename T>
TR_HOST_DEVICE T
row_loss(const RowSums<T>& s, T log_sum, T target_logit, T target_weight, const Shares<T>& shares) {
  const T loss = target_weight * (log_sum - (target_logit - s.max));
  if (shares.uniform == 0) return loss;
  return shares.target * loss + shares.uniform * (s.weight * log_sum - s.weighted);
}

// d loss / d x of class c: softmax * p_c - uniform * w_c, and at the target less `target`.
template <typename T>
struct RowGradient {
  T max, log_sum;
  T softmax, uniform, target;

  // `scale` is the gradient of the row's loss; total_weight the sum of all classes' weights.
  static TR_HOST_DEVICE RowGradient
  of(T max, T log_sum, T scale, T target_weight, T total_weight, const Shares<T>& shares) {
    const T uniform = scale * shares.uniform, target = scale * (shares.target * target_weight);
    const T softmax = shares.uniform == 0 ? target : target + uniform * total_weight;
    return {max, log_sum, softmax, uniform, target};
  }

  TR_HOST_DEVICE T at(T x, T class_weight) const {
    return std::fma(softmax, exponential((x - max) - log_sum), -(uniform * class_weight));
  }
};

}  // namespace torch_renaissance
