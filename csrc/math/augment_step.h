// SPDX-License-Identifier: BSD-3-Clause
// What an augmentation consists of: steps over images, and what one sample draws for a step.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace torch_renaissance {

inline constexpr int kMaxSteps = 12;
inline constexpr int kMaxChannels = 4;
inline constexpr int kMaxSamplings = 3;  // rotations, scalings, resizings of one augmentation
inline constexpr int kStepValues = 8;

// Geometric steps first, then colour, then erasing. By whole pixels: those up to kVerticalFlip.
enum class StepKind : int32_t {
  kWindow,  // the frame [top, top + height) x [left, left + width): padding or a fixed crop
  kRandomCrop,
  kHorizontalFlip,  // value: probability
  kVerticalFlip,    // value: probability
  kRotation,        // values: degrees from, to; counter-clockwise
  kScale,           // values: factor from, to
  kResize,
  kResizedCrop,  // values: share of the area from, to; aspect ratio from, to; their logarithms
  kColorJitter,  // values: from, to of each JitterKind; top: bits of those that are on
  kErasing,      // values: probability; then as of kResizedCrop
};
inline constexpr int kStepKinds = 10;

enum class PadMode : int32_t { kConstant, kEdge, kReflect };
enum class JitterKind : int32_t { kBrightness, kContrast, kSaturation, kHue };

struct Step {
  StepKind kind;
  int32_t stream;         // its place in the list that the user gave: what it draws depends on it
  int32_t height, width;  // of the image after it
  int32_t top, left;
  PadMode mode;
  float value[kStepValues];
};

struct Augmentation {
  int32_t channels, height, width;  // of a source image
  int32_t out_height, out_width;
  int32_t n_steps;
  bool nearest;       // else bilinear
  bool whole_pixels;  // no step samples between pixels
  bool jitters;
  Step steps[kMaxSteps];
  // By channel. Values are 0 to 255 until the end, which is value * scale + bias.
  float fill[kMaxChannels], scale[kMaxChannels], bias[kMaxChannels];
  float erased[kMaxChannels];  // what an erased pixel becomes, after scale and bias
};

// Crop and erasing: top, left, height, width, where a height of 0 is no erasing. Flips: whether.
// Jitter: the four JitterKinds in their order, two bits each.
// Rotation: degrees, cosine, sine. Scale: the factor. Jitter: the factor of each JitterKind.
struct Draw {
  int32_t integer[4];
  float real[4];
};

}  // namespace torch_renaissance
