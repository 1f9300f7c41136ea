// SPDX-License-Identifier: BSD-3-Clause
// What a sample draws for a step: a function of seed, epoch, the sample's index and the step's
// place. Distributions and rules are torchvision.transforms.v2's (their make_params). Only
// + - * / sqrt and polynomials, so every device draws the same.
#pragma once

#include <cmath>
#include <cstring>

#include "augment_step.h"
#include "philox.h"

namespace torch_renaissance {

inline constexpr int kTries = 10;  // of an area and an aspect ratio that fit the image

// Block `block` of the stream of one step in one epoch; the order of the epoch has another one.
TR_HOST_DEVICE PhiloxBlock
augment_bits(uint64_t seed, uint64_t epoch, const Step& step, int block, uint64_t sample) {
  const uint64_t stream = (epoch << 40) + (static_cast<uint64_t>(step.stream) << 8) + block;
  return philox(seed, stream, sample);
}

TR_HOST_DEVICE float uniform_between(uint32_t bits, float from, float to) {
  return from + (to - from) * uniform_float(bits);
}

TR_HOST_DEVICE int32_t uniform_offset(uint32_t bits, int32_t n) {
  return static_cast<int32_t>(uniform_below(static_cast<uint64_t>(bits) << 32, n));
}

// The nearest integer, of two the even one, as Python's and torch's round.
TR_HOST_DEVICE int32_t round_to_int(float x) {
#ifdef __CUDA_ARCH__
  return __float2int_rn(x);
#else
  return static_cast<int32_t>(std::lrintf(x));
#endif
}

// e^x for |x| < 80, to 2 ulp: x = k ln 2 + r, and the series of e^r.
TR_HOST_DEVICE float portable_exp(float x) {
  const int32_t k = round_to_int(x * 1.44269504f);
  // ln 2 in two parts, of which the first times k is exact.
  const float r =
      (x - static_cast<float>(k) * 0.693359375f) + static_cast<float>(k) * 2.12194440e-4f;
  float sum = 1.0f / 5040;
  const float series[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (const float term : series) sum = sum * r + term;
  const uint32_t bits = static_cast<uint32_t>(k + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof(power));
  return sum * power;
}

// Of |degrees| < 2^22, to 2 ulp of 1: whole quarters of the circle, and the series of the rest.
TR_HOST_DEVICE void sine_cosine(float degrees, float& sine, float& cosine) {
  const int32_t quarters = round_to_int(degrees * (1.0f / 90));
  const float t = (degrees - static_cast<float>(quarters) * 90.0f) * 0.0174532925f, square = t * t;
  const float s =
      t +
      t * square * (-1.0f / 6 + square * (1.0f / 120 + square * (-1.0f / 5040 + square / 362880)));
  const float c =
      1.0f +
      square * (-0.5f + square * (1.0f / 24 + square * (-1.0f / 720 + square * (1.0f / 40320))));
  const float of_sine = quarters & 1 ? c : s, of_cosine = quarters & 1 ? s : c;
  sine = quarters & 2 ? -of_sine : of_sine;
  cosine = (quarters + 1) & 2 ? -of_cosine : of_cosine;
}

// Height and width of a rectangle with the given share of the image's area and aspect ratio.
struct Extent {
  int32_t along, across;
};

TR_HOST_DEVICE Extent draw_extent(const PhiloxBlock& bits, const float* shares, float area) {
  const float share = area * uniform_between(bits.word[0], shares[0], shares[1]);
  const float ratio = portable_exp(uniform_between(bits.word[1], shares[4], shares[5]));
  return {round_to_int(std::sqrt(share * ratio)), round_to_int(std::sqrt(share / ratio))};
}

// The first of ten rectangles that fits: within the image, or, to be erased, smaller on both sides.
// shares: area from, to; ratio from, to; log ratio from, to. A crop's ratio is width / height, that
// of erasing height / width.
TR_HOST_DEVICE bool draw_rectangle(Draw& d,
                                   const Step& step,
                                   const float* shares,
                                   int32_t height,
                                   int32_t width,
                                   uint64_t seed,
                                   uint64_t epoch,
                                   uint64_t sample) {
  const bool erases = step.kind == StepKind::kErasing;
  const float area = static_cast<float>(height) * static_cast<float>(width);
  for (int i = 1; i <= kTries; ++i) {
    const PhiloxBlock bits = augment_bits(seed, epoch, step, i, sample);
    const Extent extent = draw_extent(bits, shares, area);
    const int32_t h = erases ? extent.along : extent.across;
    const int32_t w = erases ? extent.across : extent.along;
    const bool fits =
        erases ? h < height && w < width : 0 < h && h <= height && 0 < w && w <= width;
    if (!fits) continue;
    d.integer[0] = uniform_offset(bits.word[2], height - h + 1);
    d.integer[1] = uniform_offset(bits.word[3], width - w + 1);
    d.integer[2] = h;
    d.integer[3] = w;
    return true;
  }
  return false;
}

// RandomResizedCrop where no try fits: the middle, as large as the bounds of the ratio allow.
TR_HOST_DEVICE void take_middle(Draw& d, const float* shares, int32_t height, int32_t width) {
  const float ratio = static_cast<float>(width) / static_cast<float>(height);
  int32_t h = height, w = width;
  if (ratio < shares[2]) h = round_to_int(static_cast<float>(w) / shares[2]);
  if (ratio > shares[3]) w = round_to_int(static_cast<float>(h) * shares[3]);
  h = h < 1 ? 1 : h > height ? height : h;
  w = w < 1 ? 1 : w > width ? width : w;
  d.integer[0] = (height - h) / 2;
  d.integer[1] = (width - w) / 2;
  d.integer[2] = h;
  d.integer[3] = w;
}

// A permutation of the four JitterKinds by the digits of a number below 4!, two bits each.
TR_HOST_DEVICE int32_t jitter_order(int32_t number) {
  uint32_t left = 3u << 6 | 2u << 4 | 1u << 2;  // the kinds not taken yet
  int32_t order = 0;
  for (int32_t i = 0; i < 4; ++i) {
    const int32_t shift = 2 * (number % (4 - i));
    number /= 4 - i;
    order |= static_cast<int32_t>((left >> shift & 3u) << (2 * i));
    const uint32_t below = (1u << shift) - 1;
    left = (left & below) | (left >> 2 & ~below);
  }
  return order;
}

// `height` and `width` are those of the image that the step is applied to.
TR_HOST_DEVICE Draw draw_step(const Step& step,
                              int32_t height,
                              int32_t width,
                              uint64_t seed,
                              uint64_t epoch,
                              uint64_t sample) {
  Draw d{};
  if (step.kind == StepKind::kWindow || step.kind == StepKind::kResize) return d;
  const PhiloxBlock bits = augment_bits(seed, epoch, step, 0, sample);
  const float* v = step.value;
  switch (step.kind) {
    case StepKind::kRandomCrop:
      d.integer[0] = uniform_offset(bits.word[0], height - step.height + 1);
      d.integer[1] = uniform_offset(bits.word[1], width - step.width + 1);
      d.integer[2] = step.height;
      d.integer[3] = step.width;
      break;
    case StepKind::kRotation:
    case StepKind::kScale:
      d.real[0] = uniform_between(bits.word[0], v[0], v[1]);
      if (step.kind == StepKind::kRotation) sine_cosine(d.real[0], d.real[2], d.real[1]);
      break;
    case StepKind::kColorJitter:
      for (int i = 0; i < 4; ++i) {
        d.real[i] = uniform_between(bits.word[i], v[2 * i], v[2 * i + 1]);
      }
      d.integer[0] =
          jitter_order(uniform_offset(augment_bits(seed, epoch, step, 1, sample).word[0], 24));
      break;
    case StepKind::kResizedCrop:
    case StepKind::kErasing: {
      const bool erases = step.kind == StepKind::kErasing;
      if (erases && uniform_float(bits.word[0]) >= v[0]) break;
      const float* shares = erases ? v + 1 : v;
      const bool found = draw_rectangle(d, step, shares, height, width, seed, epoch, sample);
      if (!found && !erases) take_middle(d, shares, height, width);
      break;
    }
    default:
      d.integer[0] = uniform_float(bits.word[0]) < v[0];
  }
  return d;
}

}  // namespace torch_renaissance
