// SPDX-License-Identifier: BSD-3-Clause
// The augmentation of images: a pixel of the output from the source image and from what its sample
// has drawn. The parts stand in augment_*.h.
#pragma once

#include "augment_color.h"
#include "augment_draw.h"
#include "augment_map.h"
#include "augment_step.h"

namespace torch_renaissance {

// One sample's parameters, made once and read by all of its pixels.
struct Sample {
  Map map;
  Jitter jitter;
  int32_t erased[4];  // top, left, height, width
};

TR_HOST_DEVICE void build_sample(Sample& s, const Augmentation& a, const Draw* draws) {
  build_map(s.map, a, draws);
  s.jitter = {};
  for (int k = 0; k < 4; ++k) s.erased[k] = 0;
  for (int i = 0; i < a.n_steps; ++i) {
    const Draw& d = draws[i];
    if (a.steps[i].kind == StepKind::kColorJitter) {
      for (int k = 0; k < 4; ++k) s.jitter.factor[k] = d.real[k];
      s.jitter.order = d.integer[0];
      s.jitter.on = a.steps[i].top;
    } else if (a.steps[i].kind == StepKind::kErasing) {
      for (int k = 0; k < 4; ++k) s.erased[k] = d.integer[k];
    }
  }
}

TR_HOST_DEVICE bool changes_contrast(const Jitter& j) {
  return j.on >> static_cast<int32_t>(JitterKind::kContrast) & 1;
}

// A source image: where it lies, and the distances of rows, columns and channels.
struct Source {
  const uint8_t* data;
  int32_t row, column, channel;
};

// A NaN becomes `low`.
TR_HOST_DEVICE float clamp_to(float x, float low, float high) {
#ifdef __CUDA_ARCH__
  return fminf(fmaxf(x, low), high);
#else
  x = x > low ? x : low;
  return x < high ? x : high;
#endif
}

// On CUDA a conversion takes four times as long as an addition.
TR_HOST_DEVICE float float_of(uint8_t byte) {
#ifdef __CUDA_ARCH__
  return __int_as_float(0x4B000000 | byte) - 8388608.0f;  // 2^23 + byte
#else
  return static_cast<float>(byte);
#endif
}

TR_HOST_DEVICE int32_t floor_to_int(float x) {
#ifdef __CUDA_ARCH__
  return __float2int_rd(x);
#else
  const auto i = static_cast<int32_t>(x);
  return i - (static_cast<float>(i) > x);
#endif
}

// Where a pixel beyond the content's border is taken from.
TR_HOST_DEVICE int32_t fold(int32_t i, const Span& content, PadMode mode) {
  if (mode == PadMode::kReflect) {
    i = i < content.first ? 2 * content.first - i : i > content.last ? 2 * content.last - i : i;
  }
  return content.clamp(i);
}

// The pixel (x, y) of the source as the steps before any sampling show it.
template <int C>
TR_HOST_DEVICE void read_pixel(const Augmentation& a,
                               const Map& m,
                               const Source& s,
                               int32_t x,
                               int32_t y,
                               float (&v)[C]) {
  const bool seen = m.seen.x.holds(x) && m.seen.y.holds(y);
  const int32_t at = fold(y, m.content.y, m.mode) * s.row + fold(x, m.content.x, m.mode) * s.column;
  for (int c = 0; c < C; ++c) {
    v[c] = seen ? float_of(s.data[at + c * s.channel]) : a.fill[c];
  }
}

// How much of a bilinear sample at x comes from the span's pixels.
TR_HOST_DEVICE float coverage(const Span& span, float x) {
  const float from_first = x - static_cast<float>(span.first - 1);
  const float to_last = static_cast<float>(span.last + 1) - x;
  return clamp_to(from_first < to_last ? from_first : to_last, 0.0f, 1.0f);
}

TR_HOST_DEVICE float coverage(const Rect& r, float x, float y) {
  return coverage(r.x, x) * coverage(r.y, y);
}

// A place in the first frame, clamped to it, or to what is next to it, where nothing more changes.
TR_HOST_DEVICE float bounded(const Map& m, const Span& frame, float x) {
  const int32_t margin = m.clamps ? 0 : 2;
  return clamp_to(
      x, static_cast<float>(frame.first - margin), static_cast<float>(frame.last + margin));
}

template <int C>
TR_HOST_DEVICE void sample_nearest(const Augmentation& a,
                                   const Map& m,
                                   const Source& s,
                                   float px,
                                   float py,
                                   float (&v)[C]) {
  const Frame& f = m.frames[0];
  const int32_t x = floor_to_int(bounded(m, f.rect.x, f.map.x(px, py)) + 0.5f);
  const int32_t y = floor_to_int(bounded(m, f.rect.y, f.map.y(px, py)) + 0.5f);
  read_pixel(a, m, s, x, y, v);
  bool shown = f.rect.x.holds(x) && f.rect.y.holds(y);
  for (int i = 1; i < m.n_frames; ++i) {
    const Frame& g = m.frames[i];
    shown = shown && coverage(g.rect.x, g.map.x(px, py)) >= 0.5f &&
            coverage(g.rect.y, g.map.y(px, py)) >= 0.5f;
  }
  if (!shown) {
    for (int c = 0; c < C; ++c) v[c] = a.fill[c];
  }
}

// Both neighbours of a place along one axis.
struct Neighbours {
  int32_t at[2];   // where they are read
  bool seen[2];    // else the fill is there
  bool framed[2];  // else zero: beyond the frame torchvision blends the fill in after
  float share;     // of the second one
};

TR_HOST_DEVICE Neighbours
neighbours(float x, const Span& seen, const Span& frame, const Span& content, PadMode mode) {
  Neighbours n;
  const int32_t first = floor_to_int(x);
  for (int k = 0; k < 2; ++k) {
    n.at[k] = fold(first + k, content, mode);
    n.seen[k] = seen.holds(first + k);
    n.framed[k] = frame.holds(first + k);
  }
  n.share = x - static_cast<float>(first);
  return n;
}

TR_HOST_DEVICE float interpolate(const float (&corner)[2][2], float x_share, float y_share) {
  const float upper = corner[0][0] + x_share * (corner[0][1] - corner[0][0]);
  const float lower = corner[1][0] + x_share * (corner[1][1] - corner[1][0]);
  return upper + y_share * (lower - upper);
}

// A sample at (x, y) in the first frame, which may lie beyond its border.
template <int C>
TR_HOST_DEVICE void interpolate_source(const Augmentation& a,
                                       const Map& m,
                                       const Source& s,
                                       float x,
                                       float y,
                                       float (&v)[C]) {
  const Rect& frame = m.frames[0].rect;
  const Neighbours xs = neighbours(x, m.seen.x, frame.x, m.content.x, m.mode);
  const Neighbours ys = neighbours(y, m.seen.y, frame.y, m.content.y, m.mode);
  for (int c = 0; c < C; ++c) {
    float corner[2][2];
    for (int i = 0; i < 2; ++i) {
      for (int k = 0; k < 2; ++k) {
        const float there =
            float_of(s.data[ys.at[i] * s.row + xs.at[k] * s.column + c * s.channel]);
        const float beyond = ys.framed[i] && xs.framed[k] ? a.fill[c] : 0.0f;
        corner[i][k] = ys.seen[i] && xs.seen[k] ? there : beyond;
      }
    }
    v[c] = interpolate(corner, xs.share, ys.share);
  }
}

// The same, where all four neighbours are pixels of the source; else false.
template <int C>
TR_HOST_DEVICE bool interpolate_inside(const Map& m,
                                       const Source& s,
                                       float x,
                                       float y,
                                       float (&v)[C]) {
  const int32_t column = floor_to_int(x), row = floor_to_int(y);
  if (column < m.seen.x.first || column >= m.seen.x.last || row < m.seen.y.first ||
      row >= m.seen.y.last || m.mode != PadMode::kConstant) {
    return false;
  }
  const float x_share = x - static_cast<float>(column), y_share = y - static_cast<float>(row);
  const uint8_t* at = s.data + row * s.row + column * s.column;
  for (int c = 0; c < C; ++c, at += s.channel) {
    const float corner[2][2] = {{float_of(at[0]), float_of(at[s.column])},
                                {float_of(at[s.row]), float_of(at[s.row + s.column])}};
    v[c] = interpolate(corner, x_share, y_share);
  }
  return true;
}

template <int C>
TR_HOST_DEVICE void sample_bilinear(const Augmentation& a,
                                    const Map& m,
                                    const Source& s,
                                    float px,
                                    float py,
                                    float (&v)[C]) {
  const Frame& f = m.frames[0];
  const float x = f.map.x(px, py), y = f.map.y(px, py);
  const float near_x = bounded(m, f.rect.x, x), near_y = bounded(m, f.rect.y, y);
#ifdef __CUDA_ARCH__  // where threads would wait for those that take the other branch
  interpolate_source(a, m, s, near_x, near_y, v);
#else
  if (!interpolate_inside(m, s, near_x, near_y, v)) {
    interpolate_source(a, m, s, near_x, near_y, v);
  }
#endif
  const float shown = m.clamps ? 1.0f : coverage(f.rect, x, y);
  if (shown < 1.0f) {
    for (int c = 0; c < C; ++c) v[c] = shown * (v[c] - a.fill[c]) + a.fill[c];
  }
  for (int i = 1; i < m.n_frames; ++i) {
    const Frame& g = m.frames[i];
    const float part = coverage(g.rect, g.map.x(px, py), g.map.y(px, py));
    if (part < 1.0f) {
      for (int c = 0; c < C; ++c) v[c] = part * (part * v[c] - a.fill[c]) + a.fill[c];
    }
  }
}

// The pixel (x, y) after all geometric steps, 0 to 255. WHOLE: none samples between pixels.
template <bool WHOLE, int C>
TR_HOST_DEVICE void augmented_pixel(const Augmentation& a,
                                    const Map& m,
                                    const Source& s,
                                    int32_t x,
                                    int32_t y,
                                    float (&v)[C]) {
  if constexpr (WHOLE) {
    const int32_t sx = m.shift.x_step * x + m.shift.x_start;
    const int32_t sy = m.shift.y_step * y + m.shift.y_start;
    read_pixel(a, m, s, sx, sy, v);
  } else if (a.nearest) {
    sample_nearest(a, m, s, static_cast<float>(x), static_cast<float>(y), v);
  } else {
    sample_bilinear(a, m, s, static_cast<float>(x), static_cast<float>(y), v);
  }
}

// Normalises what the geometric steps and the colours have made of (x, y), or erases it.
template <int C>
TR_HOST_DEVICE void finish_pixel(const Augmentation& a,
                                 const Sample& s,
                                 int32_t x,
                                 int32_t y,
                                 float (&v)[C]) {
  const bool erased = static_cast<uint32_t>(y - s.erased[0]) < static_cast<uint32_t>(s.erased[2]) &&
                      static_cast<uint32_t>(x - s.erased[1]) < static_cast<uint32_t>(s.erased[3]);
  for (int c = 0; c < C; ++c) v[c] = erased ? a.erased[c] : v[c] * a.scale[c] + a.bias[c];
}

}  // namespace torch_renaissance
