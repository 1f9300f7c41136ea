// SPDX-License-Identifier: BSD-3-Clause
// A program is checked in full: whatever numbers somebody hands in, no kernel reads out of bounds.
#include "augment_program.h"

#include <cmath>

namespace torch_renaissance {
namespace {

constexpr int64_t kHeader = 6, kStepFields = 7, kHeaderValues = 4 * kMaxChannels;
constexpr int64_t kMaxSide = 1 << 20;     // whole numbers of pixels, with padding, fit a float
constexpr int64_t kMaxImage = 1LL << 30;  // values of an image

bool in_order(const float* pair) { return pair[0] <= pair[1]; }

// Share of the area, aspect ratio and its logarithm.
bool shares_are_right(const float* v) {
  return 0 <= v[0] && in_order(v) && v[1] <= 16 && 0 < v[2] && in_order(v + 2) && -40 < v[4] &&
         in_order(v + 4) && v[5] < 40;
}

bool values_are_right(const Step& s) {
  const float* v = s.value;
  switch (s.kind) {
    case StepKind::kHorizontalFlip:
    case StepKind::kVerticalFlip:
      return 0 <= v[0] && v[0] <= 1;
    case StepKind::kRotation:
      return in_order(v) && std::fabs(v[0]) <= 1e6f && std::fabs(v[1]) <= 1e6f;
    case StepKind::kScale:
      return in_order(v) && v[0] >= 1e-3f && v[1] <= 1e3f;
    case StepKind::kResizedCrop:
      return shares_are_right(v);
    case StepKind::kErasing:
      return 0 <= v[0] && v[0] <= 1 && shares_are_right(v + 1) && v[2] <= 1;
    case StepKind::kColorJitter:
      return 0 <= v[0] && in_order(v) && v[1] <= 1e6f && 0 <= v[2] && in_order(v + 2) &&
             v[3] <= 1e6f && 0 <= v[4] && in_order(v + 4) && v[5] <= 1e6f && -0.5f <= v[6] &&
             in_order(v + 6) && v[7] <= 0.5f;
    default:
      return true;
  }
}

// Reads step by step; `height` and `width` are those of the image so far.
struct Reader {
  const char* op;
  Augmentation& a;
  int64_t height, width;
  int samplings = 0;
  bool padded = false;

  template <typename... Words>
  void check(bool right, const Words&... words) const {
    TORCH_CHECK(right, op, ": ", words..., "; make programs with tr.data.Program");
  }

  void check_size(int64_t h, int64_t w) const {
    check(h >= 1 && w >= 1 && h <= kMaxSide && w <= kMaxSide && h * w * a.channels <= kMaxImage,
          "an image of ",
          a.channels,
          " x ",
          h,
          " x ",
          w,
          " is empty or too large: a side has up to 2^20 pixels, an image up to 2^30 values");
  }

  void add(at::IntArrayRef fields, at::ArrayRef<double> values) {
    const int number = a.n_steps;
    for (const int64_t field : fields) {
      check(-kMaxSide <= field && field <= kMaxSide,
            "step ",
            number,
            " holds ",
            field,
            ", expected at most 2^20");
    }
    check(0 <= fields[0] && fields[0] < kStepKinds && 0 <= fields[6] && fields[6] < 3,
          "step ",
          number,
          " is of kind ",
          fields[0],
          " and padding mode ",
          fields[6],
          ", expected less than ",
          kStepKinds,
          " and 3");
    check(0 <= fields[1] && fields[1] < 256,
          "step ",
          number,
          " has stream ",
          fields[1],
          ", expected 0 to 255");
    Step& s = a.steps[number];
    s.kind = static_cast<StepKind>(fields[0]);
    s.stream = static_cast<int32_t>(fields[1]);
    s.height = static_cast<int32_t>(fields[2]);
    s.width = static_cast<int32_t>(fields[3]);
    s.top = static_cast<int32_t>(fields[4]);
    s.left = static_cast<int32_t>(fields[5]);
    s.mode = static_cast<PadMode>(fields[6]);
    for (int k = 0; k < kStepValues; ++k) s.value[k] = static_cast<float>(values[k]);
    check(values_are_right(s), "a value of step ", number, " is out of range");
    check_size(s.height, s.width);
    check_order(s, number);
    check_frame(s, number);
    height = s.height;
    width = s.width;
    ++a.n_steps;
  }

  // Geometric steps, colour, erasing; one of each of the last two.
  void check_order(const Step& s, int number) {
    const StepKind before = number ? a.steps[number - 1].kind : StepKind::kWindow;
    const bool right =
        s.kind < StepKind::kColorJitter ? before < StepKind::kColorJitter : before < s.kind;
    check(right, "step ", number, " comes too late: geometry, ColorJitter, RandomErasing");
    const bool sampling = s.kind >= StepKind::kRotation && s.kind <= StepKind::kResizedCrop;
    samplings += sampling;
    check(samplings <= kMaxSamplings, "more than ", kMaxSamplings, " steps sample between pixels");
    a.whole_pixels = a.whole_pixels && !sampling;
    if (s.kind == StepKind::kColorJitter) {
      a.jitters = true;
      check(a.channels != 4 && 0 <= s.top && s.top < 16,
            "colour is jittered in images of 1 or 3 channels, by kinds 0 to 15; got ",
            a.channels,
            " channels and kinds ",
            s.top);
    }
  }

  void check_frame(const Step& s, int number) {
    const bool resizes = s.kind == StepKind::kResize || s.kind == StepKind::kResizedCrop;
    if (s.kind == StepKind::kWindow) {
      const bool pads = s.top < 0 || s.left < 0 || int64_t{s.top} + s.height > height ||
                        int64_t{s.left} + s.width > width;
      check(s.mode == PadMode::kConstant || (!padded && samplings == 0),
            "step ",
            number,
            " pads with the image, but is not the first one that pads or samples");
      padded = padded || pads;
    } else if (s.kind == StepKind::kRandomCrop) {
      check(s.height <= height && s.width <= width,
            "step ",
            number,
            " crops ",
            s.height,
            " x ",
            s.width,
            " from ",
            height,
            " x ",
            width);
    } else if (!resizes) {
      check(s.height == height && s.width == width,
            "step ",
            number,
            " has size ",
            s.height,
            " x ",
            s.width,
            ", expected ",
            height,
            " x ",
            width);
    }
  }
};

}  // namespace

AugmentProgram read_program(const char* op, at::IntArrayRef program, at::ArrayRef<double> values) {
  AugmentProgram p{};
  Augmentation& a = p.augmentation;
  Reader reader{op, a, 0, 0};
  const auto n_ints = static_cast<int64_t>(program.size());
  const auto n_values = static_cast<int64_t>(values.size());
  const int64_t n_steps = (n_ints - kHeader) / kStepFields;
  reader.check(n_ints >= kHeader && n_ints == kHeader + n_steps * kStepFields &&
                   n_values == kHeaderValues + n_steps * kStepValues && n_steps <= kMaxSteps,
               "program has ",
               n_ints,
               " numbers and values ",
               n_values,
               ", expected 6 + 7n and 16 + 8n with n up to ",
               kMaxSteps);
  for (const double value : values) {
    reader.check(std::isfinite(static_cast<float>(value)), "values holds ", value);
  }
  reader.check(program[0] == 1 || program[0] == 3 || program[0] == 4,
               "images must have 1, 3 or 4 channels, got ",
               program[0]);
  a.channels = static_cast<int32_t>(program[0]);
  reader.check_size(program[1], program[2]);
  reader.height = program[1];
  reader.width = program[2];
  a.height = static_cast<int32_t>(program[1]);
  a.width = static_cast<int32_t>(program[2]);
  reader.check(0 <= program[3] && program[3] < 4, "dtype is ", program[3], ", expected 0 to 3");
  p.dtype = static_cast<PixelType>(program[3]);
  p.channels_last = program[4] != 0;
  a.nearest = program[5] != 0;
  a.whole_pixels = true;
  for (int64_t i = 0; i < n_steps; ++i) {
    reader.add(program.slice(kHeader + i * kStepFields, kStepFields),
               values.slice(kHeaderValues + i * kStepValues, kStepValues));
  }
  a.out_height = static_cast<int32_t>(reader.height);
  a.out_width = static_cast<int32_t>(reader.width);
  float* const of_channels[] = {a.fill, a.scale, a.bias, a.erased};
  for (int i = 0; i < kHeaderValues; ++i) {
    of_channels[i / kMaxChannels][i % kMaxChannels] = static_cast<float>(values[i]);
  }
  return p;
}

at::ScalarType torch_dtype(PixelType dtype) {
  switch (dtype) {
    case PixelType::kByte:
      return at::kByte;
    case PixelType::kFloat:
      return at::kFloat;
    case PixelType::kHalf:
      return at::kHalf;
    case PixelType::kBFloat16:
      return at::kBFloat16;
  }
  return at::kFloat;
}

}  // namespace torch_renaissance
