// SPDX-License-Identifier: BSD-3-Clause
// The geometric steps of one sample as one map from a pixel of the output to a place in the source.
#pragma once

#include "augment_step.h"

namespace torch_renaissance {

// Note [Frames]
// torchvision makes an image after each step, and what a step pushes out of that image's frame is
// lost: a later step finds the fill there. One map would bring it back. So each frame that a later
// step can look beyond is kept, with its own map from the output, and a pixel of the output counts
// only as far as its place lies inside of each. Frames of steps by whole pixels are rectangles of
// pixels of the source (or of the image of the sampling step before) and cost nothing.

// (x, y) to (xx x + xy y + x0, yx x + yy y + y0). Pixels are points: the first is at (0, 0).
struct Affine {
  float xx, xy, x0, yx, yy, y0;

  TR_HOST_DEVICE float x(float px, float py) const { return xx * px + (xy * py + x0); }
  TR_HOST_DEVICE float y(float px, float py) const { return yx * px + (yy * py + y0); }

  // The map that applies `first` before.
  TR_HOST_DEVICE Affine after(const Affine& first) const {
    return {xx * first.xx + xy * first.yx,
            xx * first.xy + xy * first.yy,
            xx * first.x0 + xy * first.y0 + x0,
            yx * first.xx + yy * first.yx,
            yx * first.xy + yy * first.yy,
            yx * first.x0 + yy * first.y0 + y0};
  }
};

// The first and the last pixel along one axis; empty if the last comes before the first.
struct Span {
  int32_t first, last;

  TR_HOST_DEVICE Span intersect(const Span& o) const {
    return {o.first > first ? o.first : first, o.last < last ? o.last : last};
  }
  TR_HOST_DEVICE bool covers(const Span& o) const { return first <= o.first && o.last <= last; }
  TR_HOST_DEVICE bool holds(int32_t i) const { return first <= i && i <= last; }
  TR_HOST_DEVICE int32_t clamp(int32_t i) const { return i < first ? first : i > last ? last : i; }
};

struct Rect {
  Span x, y;

  TR_HOST_DEVICE Rect intersect(const Rect& o) const {
    return {x.intersect(o.x), y.intersect(o.y)};
  }
  TR_HOST_DEVICE bool covers(const Rect& o) const { return x.covers(o.x) && y.covers(o.y); }
};

struct Frame {
  Affine map;  // from a pixel of the output
  Rect rect;
};

// A map by whole pixels: x to x_step * x + x_start, and y likewise; a step is 1 or -1.
struct Shift {
  int32_t x_step, x_start, y_step, y_start;

  // The shift that applies `first` before.
  TR_HOST_DEVICE Shift after(const Shift& first) const {
    return {x_step * first.x_step,
            x_step * first.x_start + x_start,
            y_step * first.y_step,
            y_step * first.y_start + y_start};
  }
  TR_HOST_DEVICE Affine affine() const {
    return {static_cast<float>(x_step),
            0,
            static_cast<float>(x_start),
            0,
            static_cast<float>(y_step),
            static_cast<float>(y_start)};
  }
  // What pixels an image of height x width shows.
  TR_HOST_DEVICE Rect image(int32_t height, int32_t width) const {
    return {along(x_step, x_start, width), along(y_step, y_start, height)};
  }
  TR_HOST_DEVICE static Span along(int32_t step, int32_t start, int32_t length) {
    return step > 0 ? Span{start, start + length - 1} : Span{start - length + 1, start};
  }
};

struct Map {
  Frame frames[kMaxSamplings + 1];  // the first is of the source
  int32_t n_frames;
  bool clamps;   // places are clamped to the first frame (resizing); else the fill lies around it
  PadMode mode;  // how `content` goes on beyond its border
  Rect seen;     // pixels of the source that are shown; in constant mode all exist
  Rect content;  // pixels of the source that the others are made from
  Shift shift;   // the map, where no step samples between pixels
};

TR_HOST_DEVICE Rect rect_of(int32_t height, int32_t width) {
  return {{0, width - 1}, {0, height - 1}};
}

// What a step by whole pixels does to places: from a pixel of its image, of height x width, to one
// before it.
struct WholeMove {
  Shift map;
  int32_t height, width;
  PadMode mode;
};

// The same of a step that samples between pixels; `resizes`: places beyond the border are clamped
// to it.
struct Move {
  Affine map;
  int32_t height, width;
  bool resizes;
};

// About the middle of an image. The numbers are a matrix of 2 x 2.
TR_HOST_DEVICE Affine
about_middle(int32_t height, int32_t width, float xx, float xy, float yx, float yy) {
  const float x = static_cast<float>(width - 1) * 0.5f, y = static_cast<float>(height - 1) * 0.5f;
  return {xx, xy, x - (xx * x + xy * y), yx, yy, y - (yx * x + yy * y)};
}

// torch's bilinear interpolate without aligned corners; its nearest takes floor(place * ratio).
TR_HOST_DEVICE Move
resizing(int32_t height, int32_t width, int32_t to_height, int32_t to_width, bool nearest) {
  const float x = static_cast<float>(width) / static_cast<float>(to_width);
  const float y = static_cast<float>(height) / static_cast<float>(to_height);
  const float half = nearest ? 0.0f : 0.5f;
  return {{x, 0, half * x - 0.5f, 0, y, half * y - 0.5f}, to_height, to_width, true};
}

TR_HOST_DEVICE bool moves_whole_pixels(StepKind kind) { return kind <= StepKind::kVerticalFlip; }

// Of an image of height x width. Also the crop of a RandomResizedCrop.
TR_HOST_DEVICE WholeMove whole_move_of(const Step& step,
                                       const Draw& d,
                                       int32_t height,
                                       int32_t width) {
  switch (step.kind) {
    case StepKind::kWindow:
      return {{1, step.left, 1, step.top}, step.height, step.width, step.mode};
    case StepKind::kRandomCrop:
    case StepKind::kResizedCrop:
      return {{1, d.integer[1], 1, d.integer[0]}, d.integer[2], d.integer[3], PadMode::kConstant};
    default: {
      Shift map{1, 0, 1, 0};
      if (step.kind == StepKind::kHorizontalFlip && d.integer[0]) map = {-1, width - 1, 1, 0};
      if (step.kind == StepKind::kVerticalFlip && d.integer[0]) map = {1, 0, -1, height - 1};
      return {map, height, width, PadMode::kConstant};
    }
  }
}

TR_HOST_DEVICE Move
move_of(const Step& step, const Draw& d, int32_t height, int32_t width, bool nearest) {
  if (step.kind == StepKind::kResizedCrop || step.kind == StepKind::kResize) {
    return resizing(height, width, step.height, step.width, nearest);
  }
  const bool rotates = step.kind == StepKind::kRotation;
  const float c = rotates ? d.real[1] : 1.0f / d.real[0], s = rotates ? d.real[2] : 0.0f;
  return {about_middle(height, width, c, -s, s, c), height, width, false};
}

// The moves by whole pixels with which a program begins. Usually these are all, or all but a few,
// and whole numbers in registers are much faster than frames in memory.
struct WholeMoves {
  Shift map;
  int32_t height, width;  // of the image so far
  Rect seen, content;     // as in Map
  PadMode mode;

  TR_HOST_DEVICE WholeMoves(int32_t h, int32_t w)
      : map{1, 0, 1, 0},
        height(h),
        width(w),
        seen(rect_of(h, w)),
        content(seen),
        mode(PadMode::kConstant) {}

  TR_HOST_DEVICE void apply(const WholeMove& move) {
    map = map.after(move.map);
    height = move.height;
    width = move.width;
    const Rect frame = map.image(height, width);
    if (move.mode == PadMode::kConstant) {
      seen = seen.intersect(frame);
    } else {
      content = seen;
      seen = frame;
      mode = move.mode;
    }
  }
};

// Goes on from there: `height` and `width` are those of the image so far.
struct MapBuilder {
  Map& m;
  int32_t height, width;
  bool sampled;  // the last frame is the image of a step that samples

  TR_HOST_DEVICE MapBuilder(Map& map, const WholeMoves& begun)
      : m(map), height(begun.height), width(begun.width), sampled(false) {
    m.frames[0] = {begun.map.affine(), begun.map.image(height, width)};
    m.n_frames = 1;
    m.clamps = false;
    m.mode = begun.mode;
    m.seen = begun.seen;
    m.content = begun.content;
    m.shift = begun.map;
  }

  TR_HOST_DEVICE Frame& last() { return m.frames[m.n_frames - 1]; }

  // The frame of the image so far, in pixels of the last frame; between the two are whole pixels.
  TR_HOST_DEVICE Rect image() {
    const Affine& a = last().map;
    return {Shift::along(a.xx > 0 ? 1 : -1, static_cast<int32_t>(a.x0), width),
            Shift::along(a.yy > 0 ? 1 : -1, static_cast<int32_t>(a.y0), height)};
  }

  TR_HOST_DEVICE void apply(const Move& move) {
    if (!sampled) {
      m.clamps = move.resizes;
    } else if (move.resizes && last().rect.covers(image())) {
      --m.n_frames;  // it doesn't look beyond
    }
    go(move.map, move.height, move.width);
    m.frames[m.n_frames++] = {{1, 0, 0, 0, 1, 0}, rect_of(height, width)};
    sampled = true;
  }

  TR_HOST_DEVICE void apply(const WholeMove& move) {
    go(move.map.affine(), move.height, move.width);
    last().rect = last().rect.intersect(image());
  }

  TR_HOST_DEVICE void go(const Affine& map, int32_t to_height, int32_t to_width) {
    for (int i = 0; i < m.n_frames; ++i) m.frames[i].map = m.frames[i].map.after(map);
    height = to_height;
    width = to_width;
  }

  TR_HOST_DEVICE void finish() {
    if (sampled && last().rect.covers(image())) --m.n_frames;
  }
};

// `draws` has one entry a step.
TR_HOST_DEVICE void build_map(Map& map, const Augmentation& a, const Draw* draws) {
  int i = 0;
  WholeMoves begun(a.height, a.width);
  for (; i < a.n_steps && moves_whole_pixels(a.steps[i].kind); ++i) {
    begun.apply(whole_move_of(a.steps[i], draws[i], begun.height, begun.width));
  }
  const bool crops = i < a.n_steps && a.steps[i].kind == StepKind::kResizedCrop;
  if (crops) begun.apply(whole_move_of(a.steps[i], draws[i], begun.height, begun.width));
  MapBuilder builder(map, begun);
  for (const int first = i; i < a.n_steps && a.steps[i].kind < StepKind::kColorJitter; ++i) {
    const Step& step = a.steps[i];
    const bool whole = moves_whole_pixels(step.kind);
    if (whole || (step.kind == StepKind::kResizedCrop && i > first)) {
      builder.apply(whole_move_of(step, draws[i], builder.height, builder.width));
    }
    if (!whole) {
      builder.apply(move_of(step, draws[i], builder.height, builder.width, a.nearest));
    }
  }
  builder.finish();
}

}  // namespace torch_renaissance
