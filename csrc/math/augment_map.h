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

// A map by whole pixels: x to x_step * x + x_start, and y likewise.
struct Shift {
  int32_t x_step, x_start, y_step, y_start;
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

// What a step does to places: from a pixel of its image, of height x width, to one before it.
struct Move {
  Affine map;
  int32_t height, width;
  bool samples;  // between pixels; else `map` is a Shift
  bool resizes;  // places beyond the border are clamped to it
  PadMode mode;
};

TR_HOST_DEVICE Move move_by(int32_t top, int32_t left, int32_t height, int32_t width) {
  return {{1, 0, static_cast<float>(left), 0, 1, static_cast<float>(top)},
          height,
          width,
          false,
          false,
          PadMode::kConstant};
}

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
  return {{x, 0, half * x - 0.5f, 0, y, half * y - 0.5f},
          to_height,
          to_width,
          true,
          true,
          PadMode::kConstant};
}

// Of an image of height x width. RandomResizedCrop makes two, a crop and a resizing.
TR_HOST_DEVICE Move
move_of(const Step& step, const Draw& d, int part, int32_t height, int32_t width, bool nearest) {
  Move move = move_by(0, 0, height, width);
  switch (step.kind) {
    case StepKind::kWindow:
      move = move_by(step.top, step.left, step.height, step.width);
      move.mode = step.mode;
      break;
    case StepKind::kHorizontalFlip:
      if (d.integer[0]) move.map = {-1, 0, static_cast<float>(width - 1), 0, 1, 0};
      break;
    case StepKind::kVerticalFlip:
      if (d.integer[0]) move.map = {1, 0, 0, 0, -1, static_cast<float>(height - 1)};
      break;
    case StepKind::kRotation:
    case StepKind::kScale: {
      const bool rotates = step.kind == StepKind::kRotation;
      const float c = rotates ? d.real[1] : 1.0f / d.real[0], s = rotates ? d.real[2] : 0.0f;
      move.map = about_middle(height, width, c, -s, s, c);
      move.samples = true;
      break;
    }
    case StepKind::kRandomCrop:
    case StepKind::kResizedCrop:
    case StepKind::kResize:
      if (step.kind != StepKind::kResize && part == 0) {
        move = move_by(d.integer[0], d.integer[1], d.integer[2], d.integer[3]);
      } else {
        move = resizing(height, width, step.height, step.width, nearest);
      }
      break;
    case StepKind::kColorJitter:
    case StepKind::kErasing:
      break;
  }
  return move;
}

// Builds the map move by move: `height` and `width` are those of the image so far.
struct MapBuilder {
  Map& m;
  int32_t height, width;
  bool sampled;  // the last frame is the image of a step that samples

  TR_HOST_DEVICE MapBuilder(Map& map, int32_t h, int32_t w)
      : m(map), height(h), width(w), sampled(false) {
    m.frames[0] = {{1, 0, 0, 0, 1, 0}, rect_of(h, w)};
    m.n_frames = 1;
    m.clamps = false;
    m.mode = PadMode::kConstant;
    m.seen = m.content = rect_of(h, w);
  }

  TR_HOST_DEVICE Frame& last() { return m.frames[m.n_frames - 1]; }

  // The frame of the image so far, in pixels of the last frame; between the two are whole pixels.
  TR_HOST_DEVICE Rect image() {
    const Affine& a = last().map;
    return {along(a.xx, a.x0, width), along(a.yy, a.y0, height)};
  }

  TR_HOST_DEVICE static Span along(float direction, float start, int32_t length) {
    const auto from = static_cast<int32_t>(start);
    return direction > 0 ? Span{from, from + length - 1} : Span{from - length + 1, from};
  }

  TR_HOST_DEVICE void apply(const Move& move) {
    if (move.samples) before_sampling(move.resizes);
    for (int i = 0; i < m.n_frames; ++i) m.frames[i].map = m.frames[i].map.after(move.map);
    height = move.height;
    width = move.width;
    if (move.samples) {
      m.frames[m.n_frames++] = {{1, 0, 0, 0, 1, 0}, rect_of(height, width)};
      sampled = true;
    } else {
      after_shift(move.mode);
    }
  }

  TR_HOST_DEVICE void before_sampling(bool resizes) {
    const Rect frame = image();
    if (!sampled) {
      m.frames[0].rect = frame;
      m.clamps = resizes;
    } else if (resizes && last().rect.covers(frame)) {
      --m.n_frames;  // it doesn't look beyond
    }
  }

  TR_HOST_DEVICE void after_shift(PadMode mode) {
    const Rect frame = image();
    if (sampled) {
      last().rect = last().rect.intersect(frame);
    } else if (mode == PadMode::kConstant) {
      m.seen = m.seen.intersect(frame);
    } else {
      m.content = m.seen;
      m.seen = frame;
      m.mode = mode;
    }
  }

  TR_HOST_DEVICE void finish() {
    const Affine& a = m.frames[0].map;
    m.shift = {static_cast<int32_t>(a.xx),
               static_cast<int32_t>(a.x0),
               static_cast<int32_t>(a.yy),
               static_cast<int32_t>(a.y0)};
    const Rect frame = image();
    if (!sampled) m.frames[0].rect = frame;
    if (sampled && last().rect.covers(frame)) --m.n_frames;
  }
};

// `draws` has one entry a step.
TR_HOST_DEVICE void build_map(Map& map, const Augmentation& a, const Draw* draws) {
  MapBuilder builder(map, a.height, a.width);
  int part = 0;
  for (int i = 0; i < a.n_steps && a.steps[i].kind < StepKind::kColorJitter;) {
    builder.apply(move_of(a.steps[i], draws[i], part, builder.height, builder.width, a.nearest));
    const bool again = a.steps[i].kind == StepKind::kResizedCrop && part == 0;
    part = again;
    i += !again;
  }
  builder.finish();
}

}  // namespace torch_renaissance
