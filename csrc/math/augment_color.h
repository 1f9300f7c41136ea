// SPDX-License-Identifier: BSD-3-Clause
// ColorJitter: torchvision's adjust_brightness, _contrast, _saturation and _hue, on values of 0 to
// 255 that stay float from step to step.
#pragma once

#include "augment_draw.h"

namespace torch_renaissance {

struct Jitter {
  float factor[4];
  int32_t order;  // JitterKinds, two bits each
  int32_t on;     // a bit for each JitterKind
  float mean;     // grey of the image where the contrast is changed
};

TR_HOST_DEVICE float limit(float x) { return x < 0.0f ? 0.0f : x > 255.0f ? 255.0f : x; }

template <int C>
TR_HOST_DEVICE float grey_of(const float (&v)[C]) {
  if constexpr (C < 3) {
    return v[0];
  } else {
    return 0.2989f * v[0] + 0.587f * v[1] + 0.114f * v[2];
  }
}

// Grey as a whole number, so that a sum of them doesn't depend on its order.
inline constexpr float kGreyUnit = 1024.0f;

template <int C>
TR_HOST_DEVICE uint32_t grey_units(const float (&v)[C]) {
  return static_cast<uint32_t>(round_to_int(grey_of(v) * kGreyUnit));
}

TR_HOST_DEVICE float mean_grey(uint64_t units, int64_t pixels) {
  return static_cast<float>(static_cast<double>(units) /
                            (static_cast<double>(pixels) * static_cast<double>(kGreyUnit)));
}

template <int C>
TR_HOST_DEVICE void blend(float (&v)[C], float with, float factor) {
  for (int c = 0; c < C; ++c) v[c] = limit(factor * v[c] + (1.0f - factor) * with);
}

// Turns the hue by `turns` of the circle. Value and saturation stay, so each channel becomes
// value - delta * max(0, min(k, 4 - k, 1)) with k = (n + 6 hue) mod 6 and n = 5, 3, 1.
TR_HOST_DEVICE void turn_hue(float (&v)[3], float turns) {
  const float r = v[0], g = v[1], b = v[2];
  const float high = r > g ? (r > b ? r : b) : (g > b ? g : b);
  const float low = r < g ? (r < b ? r : b) : (g < b ? g : b);
  const float delta = high - low;
  if (delta == 0.0f) return;
  const float sixths = high == r   ? (g - b) / delta
                       : high == g ? (b - r) / delta + 2.0f
                                   : (r - g) / delta + 4.0f;  // from -1 to 5
  for (int c = 0; c < 3; ++c) {
    float k = sixths + 6.0f * turns + static_cast<float>(5 - 2 * c);  // above -4, below 13
    k = k < 0.0f ? k + 6.0f : k >= 12.0f ? k - 12.0f : k >= 6.0f ? k - 6.0f : k;
    float share = k < 4.0f - k ? k : 4.0f - k;
    share = share > 1.0f ? 1.0f : share < 0.0f ? 0.0f : share;
    v[c] = high - delta * share;
  }
}

// All steps, or with `before_contrast` those that come before it.
template <int C>
TR_HOST_DEVICE void jitter(float (&v)[C], const Jitter& j, bool before_contrast) {
  for (int i = 0; i < 4; ++i) {
    const auto kind = static_cast<JitterKind>(j.order >> (2 * i) & 3);
    if (!(j.on >> static_cast<int32_t>(kind) & 1)) continue;
    const float factor = j.factor[static_cast<int32_t>(kind)];
    if (kind == JitterKind::kBrightness) {
      blend(v, 0.0f, factor);
    } else if (kind == JitterKind::kContrast) {
      if (before_contrast) return;
      blend(v, j.mean, factor);
    } else if constexpr (C == 3) {
      if (kind == JitterKind::kSaturation) {
        blend(v, grey_of(v), factor);
      } else {
        turn_hue(v, factor);
      }
    }
  }
}

}  // namespace torch_renaissance
