// SPDX-License-Identifier: BSD-3-Clause
// The augmentation on the CPU: samples in parallel, each row by row.
#include "../augment.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>

namespace torch_renaissance {
namespace {

template <typename scalar_t>
scalar_t stored(float x) {
  if constexpr (std::is_same_v<scalar_t, uint8_t>) {
    return static_cast<uint8_t>(round_to_int(limit(x)));
  } else {
    return static_cast<scalar_t>(x);
  }
}

// Calls f(x, y, v) with each pixel as the geometric steps make it.
template <bool WHOLE, int C, typename F>
void for_each_pixel(const Augmentation& a, const Map& map, const Source& source, F f) {
  for (int32_t y = 0; y < a.out_height; ++y) {
    for (int32_t x = 0; x < a.out_width; ++x) {
      float v[C];
      augmented_pixel<WHOLE>(a, map, source, x, y, v);
      f(x, y, v);
    }
  }
}

template <typename scalar_t, int C, bool WHOLE>
void augment_sample(const Augment& job, const Cursor& cursor, int64_t image, int64_t i) {
  const Augmentation& a = job.augmentation;
  Draw draws[kMaxSteps];
  for (int k = 0; k < a.n_steps; ++k) draws[k] = draw_step_of(a, k, cursor, image);
  Sample sample;
  build_sample(sample, a, draws);
  const Source source = source_of(job, job.images + image * job.image_size());
  if (changes_contrast(sample.jitter)) {
    uint64_t units = 0;
    for_each_pixel<WHOLE, C>(a, sample.map, source, [&](int32_t, int32_t, float (&v)[C]) {
      jitter(v, sample.jitter, true);
      units += grey_units(v);
    });
    sample.jitter.mean = mean_grey(units, job.out_pixels());
  }
  const int64_t pixels = job.out_pixels();
  const int64_t pixel = job.out_channels_last ? C : 1, channel = job.out_channels_last ? 1 : pixels;
  auto out = static_cast<scalar_t*>(job.out) + i * pixels * C;
  for_each_pixel<WHOLE, C>(a, sample.map, source, [&](int32_t x, int32_t y, float (&v)[C]) {
    if (a.jitters) jitter(v, sample.jitter, false);
    finish_pixel(a, sample, x, y, v);
    for (int c = 0; c < C; ++c) out[c * channel] = stored<scalar_t>(v[c]);
    out += pixel;
  });
}

template <typename scalar_t, int C>
void augment_batch(const Augment& job, const Cursor& cursor) {
  at::parallel_for(0, job.n, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = image_of(job, cursor, i);
      if (job.augmentation.whole_pixels) {
        augment_sample<scalar_t, C, true>(job, cursor, image, i);
      } else {
        augment_sample<scalar_t, C, false>(job, cursor, image, i);
      }
      if (job.labels) {
        std::copy_n(job.labels + image * job.label_bytes,
                    job.label_bytes,
                    job.out_labels + i * job.label_bytes);
      }
    }
  });
}

template <typename scalar_t>
void of_channels(const Augment& job, const Cursor& cursor) {
  if (job.augmentation.channels == 1) return augment_batch<scalar_t, 1>(job, cursor);
  if (job.augmentation.channels == 3) return augment_batch<scalar_t, 3>(job, cursor);
  augment_batch<scalar_t, 4>(job, cursor);
}

}  // namespace

void augment_cpu(const Augment& job) {
  const Cursor cursor =
      job.cursor ? *job.cursor
                 : Cursor{static_cast<int64_t>(job.seed), static_cast<int64_t>(job.epoch), 0, 0};
  switch (job.dtype) {
    case PixelType::kByte:
      of_channels<uint8_t>(job, cursor);
      break;
    case PixelType::kFloat:
      of_channels<float>(job, cursor);
      break;
    case PixelType::kHalf:
      of_channels<c10::Half>(job, cursor);
      break;
    case PixelType::kBFloat16:
      of_channels<c10::BFloat16>(job, cursor);
      break;
  }
  if (job.cursor) job.cursor->position += job.n;
}

}  // namespace torch_renaissance
