// SPDX-License-Identifier: BSD-3-Clause
// sample_bilinear() where all that lies outside of the image is black: the same bits for less than
// half of the work.
#pragma once

#include "augment.h"

namespace torch_renaissance {

// Of a frame along one axis.
struct Bounds {
  float low, high;  // of the places that have a share in it, excluded

  TR_HOST_DEVICE explicit Bounds(const Span& frame)
      : low(static_cast<float>(frame.first - 1)), high(static_cast<float>(frame.last + 1)) {}

  // coverage()
  TR_HOST_DEVICE float share(float x) const {
#ifdef __CUDA_ARCH__
    return __saturatef(fminf(x - low, high - x));
#else
    return clamp_to(x - low < high - x ? x - low : high - x, 0.0f, 1.0f);
#endif
  }
  // bounded(), of a map that doesn't clamp
  TR_HOST_DEVICE float near(float x) const { return clamp_to(x, low - 1.0f, high + 1.0f); }
};

// A place on the grid of pixels.
struct Place {
  int32_t whole;
  float share;

  TR_HOST_DEVICE explicit Place(float x) {
#ifdef __CUDA_ARCH__
    // Adding 2^23 + 2^22 leaves no bits for a fraction; rounded down, this is floor() at a quarter
    // of its price.
    constexpr float kShift = 12582912.0f;
    const float shifted = __fadd_rd(x, kShift);
    whole = __float_as_int(shifted) - __float_as_int(kShift);
    share = x - (shifted - kShift);
#else
    whole = floor_to_int(x);
    share = x - static_cast<float>(whole);
#endif
  }
};

// The pixel (px, py) of the output; `framed`: it has to lie in the map's second frame too.
// read(at): byte `at` of the source.
template <int C, typename Read>
TR_HOST_DEVICE void sample_on_black(const Map& m,
                                    const Source& s,
                                    const Affine& first,
                                    const Affine& second,
                                    bool framed,
                                    float px,
                                    float py,
                                    const Read& read,
                                    float (&v)[C]) {
  const Bounds xs(m.frames[0].rect.x), ys(m.frames[0].rect.y);
  const float x = first.x(px, py), y = first.y(px, py);
  const Place column(xs.near(x)), row(ys.near(y));
  const bool left = m.seen.x.holds(column.whole), right = m.seen.x.holds(column.whole + 1);
  const bool upper = m.seen.y.holds(row.whole), lower = m.seen.y.holds(row.whole + 1);
  const auto pixel = [&](bool seen, int32_t at) { return seen ? float_of(read(at)) : 0.0f; };
  float shown = xs.share(x) * ys.share(y), part = 1.0f;
  if (framed) {
    const Bounds xs2(m.frames[1].rect.x), ys2(m.frames[1].rect.y);
    part = xs2.share(second.x(px, py)) * ys2.share(second.y(px, py));
  }
  for (int c = 0; c < C; ++c) {
    const int32_t at = row.whole * s.row + column.whole * s.column + c * s.channel;
    const float corner[2][2] = {
        {pixel(upper && left, at), pixel(upper && right, at + s.column)},
        {pixel(lower && left, at + s.row), pixel(lower && right, at + s.row + s.column)}};
    v[c] = part * (part * (shown * interpolate(corner, column.share, row.share)));
  }
}

}  // namespace torch_renaissance
