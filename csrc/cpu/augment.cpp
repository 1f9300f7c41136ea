// SPDX-License-Identifier: BSD-3-Clause
// The augmentation on the CPU: samples in parallel, each row by row.
#include "../augment.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <type_traits>
#include <vector>

namespace torch_renaissance {
namespace {

// Few functions with the long formulas in them: they are slow to compile, and inlined everywhere.
Sample sample_of(const Augment& job, const Cursor& cursor, int64_t image) {
  const Augmentation& a = job.augmentation;
  Draw draws[kMaxSteps];
  for (int k = 0; k < a.n_steps; ++k) draws[k] = draw_step_of(a, k, cursor, image);
  Sample sample;
  build_sample(sample, a, draws);
  return sample;
}

// Row y as the geometric steps make it: [width][C].
template <bool WHOLE, int C>
void make_row(const Augmentation& a, const Map& map, const Source& source, int32_t y, float* row) {
  for (int32_t x = 0; x < a.out_width; ++x, row += C) {
    float v[C];
    augmented_pixel<WHOLE>(a, map, source, x, y, v);
    std::copy_n(v, C, row);
  }
}

template <int C>
void make_row(const Augmentation& a, const Map& map, const Source& source, int32_t y, float* row) {
  return a.whole_pixels ? make_row<true, C>(a, map, source, y, row)
                        : make_row<false, C>(a, map, source, y, row);
}

template <int C, typename F>
void for_each_pixel(const Augmentation& a, float* row, F f) {
  for (int32_t x = 0; x < a.out_width; ++x, row += C) {
    f(x, *reinterpret_cast<float (*)[C]>(row));
  }
}

template <int C>
float mean_where_contrast_changes(const Augment& job,
                                  const Sample& sample,
                                  const Source& source,
                                  float* row) {
  uint64_t units = 0;
  for (int32_t y = 0; y < job.augmentation.out_height; ++y) {
    make_row<C>(job.augmentation, sample.map, source, y, row);
    for_each_pixel<C>(job.augmentation, row, [&](int32_t, float (&v)[C]) {
      jitter(v, sample.jitter, true);
      units += grey_units(v);
    });
  }
  return mean_grey(units, job.out_pixels());
}

template <typename scalar_t>
scalar_t stored(float x) {
  if constexpr (std::is_same_v<scalar_t, uint8_t>) {
    return static_cast<uint8_t>(round_to_int(limit(x)));
  } else {
    return static_cast<scalar_t>(x);
  }
}

template <typename scalar_t>
void store_row(const Augment& job, int64_t i, int32_t y, const float* row) {
  const Augmentation& a = job.augmentation;
  const int64_t pixels = job.out_pixels(), channels = a.channels;
  const int64_t pixel = job.out_channels_last ? channels : 1;
  const int64_t channel = job.out_channels_last ? 1 : pixels;
  auto out = static_cast<scalar_t*>(job.out) + i * pixels * channels + y * a.out_width * pixel;
  for (int64_t c = 0; c < channels; ++c) {
    for (int64_t x = 0; x < a.out_width; ++x) {
      out[c * channel + x * pixel] = stored<scalar_t>(row[x * channels + c]);
    }
  }
}

void store_row(const Augment& job, int64_t i, int32_t y, const float* row) {
  switch (job.dtype) {
    case PixelType::kByte:
      return store_row<uint8_t>(job, i, y, row);
    case PixelType::kFloat:
      return store_row<float>(job, i, y, row);
    case PixelType::kHalf:
      return store_row<c10::Half>(job, i, y, row);
    case PixelType::kBFloat16:
      return store_row<c10::BFloat16>(job, i, y, row);
  }
}

template <int C>
void augment_sample(const Augment& job,
                    const Cursor& cursor,
                    int64_t image,
                    int64_t i,
                    float* row) {
  const Augmentation& a = job.augmentation;
  Sample sample = sample_of(job, cursor, image);
  const Source source = source_of(job, job.images + image * job.image_size());
  if (changes_contrast(sample.jitter)) {
    sample.jitter.mean = mean_where_contrast_changes<C>(job, sample, source, row);
  }
  for (int32_t y = 0; y < a.out_height; ++y) {
    make_row<C>(a, sample.map, source, y, row);
    for_each_pixel<C>(a, row, [&](int32_t x, float (&v)[C]) {
      if (a.jitters) jitter(v, sample.jitter, false);
      finish_pixel(a, sample, x, y, v);
    });
    store_row(job, i, y, row);
  }
}

template <int C>
void augment_batch(const Augment& job, const Cursor& cursor) {
  at::parallel_for(0, job.n, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> row(static_cast<size_t>(job.augmentation.out_width) * C);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t image = image_of(job, cursor, i);
      augment_sample<C>(job, cursor, image, i, row.data());
      if (job.labels) {
        std::copy_n(job.labels + image * job.label_bytes,
                    job.label_bytes,
                    job.out_labels + i * job.label_bytes);
      }
    }
  });
}

}  // namespace

void augment_cpu(const Augment& job) {
  const Cursor cursor =
      job.cursor ? *job.cursor
                 : Cursor{static_cast<int64_t>(job.seed), static_cast<int64_t>(job.epoch), 0, 0};
  if (job.augmentation.channels == 1) {
    augment_batch<1>(job, cursor);
  } else if (job.augmentation.channels == 3) {
    augment_batch<3>(job, cursor);
  } else {
    augment_batch<4>(job, cursor);
  }
  if (job.cursor) job.cursor->position += job.n;
}

}  // namespace torch_renaissance
