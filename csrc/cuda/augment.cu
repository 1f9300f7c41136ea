// SPDX-License-Identifier: BSD-3-Clause
// The augmentation on CUDA: a block draws the parameters of a few samples, then makes their pixels.
// augment_lean.cu does the usual ones faster.
#include "augment.h"

#include "augment_block.cuh"
#include "augment_store.cuh"

namespace torch_renaissance {
namespace {

enum class Way { kWhole, kSampled, kJittered };

// Pixels of a thread at a time. Whole pixels are bound by memory and want stores of 16 bytes; the
// others are bound by arithmetic, and want registers and short code.
template <Way way>
constexpr int kGroup = way == Way::kWhole ? 8 : 2;

template <Way way, int C>
__device__ void make_pixel(const Augmentation& a,
                           const Sample& sample,
                           const Source& source,
                           int32_t x,
                           int32_t y,
                           float (&v)[C]) {
  augmented_pixel<way == Way::kWhole>(a, sample.map, source, x, y, v);
  if constexpr (way == Way::kJittered) jitter(v, sample.jitter, false);
  finish_pixel(a, sample, x, y, v);
}

// The sum of the grey of all pixels where the contrast is changed, into shared.grey_units.
template <int C>
__device__ void measure_contrast(const Augment& job, Shared& shared, const Source& source) {
  const Augmentation& a = job.augmentation;
  const Sample& sample = shared.sample[0];
  unsigned long long units = 0;
  for (int32_t p = threadIdx.x; p < job.out_pixels(); p += kAugmentThreads) {
    float v[C];
    augmented_pixel<false>(a, sample.map, source, p % a.out_width, p / a.out_width, v);
    jitter(v, sample.jitter, true);
    units += grey_units(v);
  }
  for (int offset = 16; offset > 0; offset /= 2) {
    units += __shfl_down_sync(0xFFFFFFFFu, units, offset);
  }
  if (threadIdx.x % 32 == 0) atomicAdd(&shared.grey_units, units);
}

// A group of pixels, row by row, of sample i of the batch.
template <Way way, int C>
__device__ void make_group(const Augment& job,
                           const Sample& sample,
                           const Source& source,
                           bool exists,
                           int64_t i,
                           int32_t group) {
  const Augmentation& a = job.augmentation;
  constexpr int N = kGroup<way>;
  const int32_t pixels = job.out_pixels(), first = group * N;
  int32_t y = first / a.out_width, x = first - y * a.out_width;
  float values[C][N];
  if (exists) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      float v[C];
      make_pixel<way>(a, sample, source, x, y, v);
      for (int c = 0; c < C; ++c) values[c][k] = v[c];
      const bool ends = ++x == a.out_width;
      x = ends ? 0 : x;
      y += ends;
    }
  } else {
    for (int c = 0; c < C; ++c) {
      for (int k = 0; k < N; ++k) values[c][k] = nan_of_device();
    }
  }
  store_group(job, values, i, first, pixels);
}

template <Way way, int C, bool staged>
__device__ void make_pixels(const Augment& job,
                            const Plan& plan,
                            Shared& shared,
                            const Block& block) {
  constexpr int N = kGroup<way>;
  const int32_t groups = (job.out_pixels() + N - 1) / N;
  const auto source = [&](int s) {
    if constexpr (staged) return source_of(job, stage + s * plan.stage_stride);
    const int64_t image = shared.image[s] < 0 ? 0 : shared.image[s];
    return source_of(job, job.images + image * job.image_size());
  };
  if constexpr (way == Way::kJittered) {  // the block has one sample
    if (shared.image[0] >= 0 && changes_contrast(shared.sample[0].jitter)) {
      measure_contrast<C>(job, shared, source(0));
      __syncthreads();
      if (threadIdx.x == 0) {
        shared.sample[0].jitter.mean = mean_grey(shared.grey_units, job.out_pixels());
      }
      __syncthreads();
    }
  }
  const int32_t step = plan.parts * kAugmentThreads;
  for (int32_t i = block.part * kAugmentThreads + threadIdx.x; i < block.count * groups;
       i += step) {
    const int32_t s = i / groups;
    make_group<way, C>(
        job, shared.sample[s], source(s), shared.image[s] >= 0, block.first + s, i - s * groups);
  }
}

template <Way way, int C>
__global__ void __launch_bounds__(kAugmentThreads, kBlocksPerMultiprocessor)
    augment_kernel(const __grid_constant__ Augment job, const __grid_constant__ Plan plan) {
  __shared__ Shared shared;
  const Block block = begin_block(job, plan, shared);
  if (plan.stage_stride) {
    make_pixels<way, C, true>(job, plan, shared, block);
  } else {
    make_pixels<way, C, false>(job, plan, shared, block);
  }
  end_block(job, plan, shared, block);
}

template <Way way, int C>
cudaError_t launch(const Augment& job, cudaStream_t stream) {
  const Plan plan = plan_of(job, kGroup<way>, multiprocessors());
  const int64_t blocks = (job.n + plan.block_samples - 1) / plan.block_samples * plan.parts;
  const int bytes = plan.stage_stride * plan.block_samples;
  augment_kernel<way, C><<<blocks, kAugmentThreads, bytes, stream>>>(job, plan);
  return cudaGetLastError();
}

template <int C>
cudaError_t launch_way(const Augment& job, cudaStream_t stream) {
  if constexpr (C != 4) {
    if (job.augmentation.jitters) return launch<Way::kJittered, C>(job, stream);
  }
  if (job.augmentation.whole_pixels) return launch<Way::kWhole, C>(job, stream);
  return launch<Way::kSampled, C>(job, stream);
}

}  // namespace

cudaError_t augment_cuda(const Augment& job, cudaStream_t stream) {
  if (job.n == 0) return cudaSuccess;
  if (is_lean(job)) return augment_lean_cuda(job, stream);
  switch (job.augmentation.channels) {
    case 1:
      return launch_way<1>(job, stream);
    case 3:
      return launch_way<3>(job, stream);
    case 4:
      return launch_way<4>(job, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torch_renaissance
