// SPDX-License-Identifier: BSD-3-Clause
// What the augmentation's kernels share: how a batch is cut into blocks, and what a block does
// before it makes pixels.
#pragma once

#include <cuda_pipeline_primitives.h>
#include <cuda_runtime_api.h>

#include <algorithm>

#include "../augment.h"
#include "launch.h"

namespace torch_renaissance {

inline constexpr int kAugmentThreads = 256, kAugmentWarps = kAugmentThreads / 32;
inline constexpr int kMaxBlockSamples = 16;
inline constexpr int64_t kStageBytes = 16 << 10;  // of shared memory for the images of a block
inline constexpr int kBlocksPerMultiprocessor = 4;

extern __shared__ __align__(16) uint8_t stage[];  // images of the block's samples

// How the batch is cut: a block makes a part of each of a few samples.
struct Plan {
  int32_t block_samples, parts;
  int32_t stage_stride;  // bytes; 0: images are read where they lie
  int32_t load_bytes;    // of one load into shared memory
  int32_t label_unit;    // bytes copied at once
  bool stages_labels;
};

struct Shared {
  Cursor cursor;
  int64_t image[kMaxBlockSamples];   // -1: out of range
  uint64_t label[kMaxBlockSamples];  // where each has 8 bytes
  Sample sample[kMaxBlockSamples];
  Draw draws[kMaxBlockSamples][kMaxSteps];
  unsigned long long grey_units;
};

// Part `part` of `count` samples from `first` on.
struct Block {
  int64_t first;
  int count, part;
};

// Note [Last block]
// Every block reads the cursor, which the same launch must move on. Each block takes a ticket
// (Cursor::done) once its first warp has read it; whoever draws the last one knows that nobody will
// read again.
__device__ inline void move_cursor(Cursor* cursor, int64_t size) {
  const auto done = reinterpret_cast<unsigned long long*>(&cursor->done);
  if (atomicAdd(done, 1ULL) + 1 != gridDim.x) return;
  cursor->position += size;
  cursor->done = 0;
}

template <typename unit_t>
__device__ void copy_labels(const Augment& job, const Shared& shared, const Block& block) {
  const auto row = static_cast<int32_t>(job.label_bytes / sizeof(unit_t));
  for (int32_t i = threadIdx.x; i < block.count * row; i += kAugmentThreads) {
    const int32_t sample = i / row, at = i - sample * row;
    const int64_t image = shared.image[sample];
    const auto from = reinterpret_cast<const unit_t*>(job.labels);
    // Of an image out of range: -1 or NaN.
    reinterpret_cast<unit_t*>(job.out_labels)[(block.first + sample) * row + at] =
        image < 0 ? static_cast<unit_t>(~unit_t{0}) : from[image * row + at];
  }
}

__device__ inline void stage_images(const Augment& job,
                                    const Plan& plan,
                                    const Shared& shared,
                                    int count) {
  const auto size = static_cast<int32_t>(job.image_size());
  for (int s = 0; s < count; ++s) {
    if (shared.image[s] < 0) continue;
    const uint8_t* from = job.images + shared.image[s] * size;
    uint8_t* to = stage + s * plan.stage_stride;
    if (plan.load_bytes == 16) {
      for (int32_t i = 16 * threadIdx.x; i < size; i += 16 * kAugmentThreads) {
        __pipeline_memcpy_async(to + i, from + i, 16);
      }
    } else if (plan.load_bytes == 4) {
      for (int32_t i = 4 * threadIdx.x; i < size; i += 4 * kAugmentThreads) {
        __pipeline_memcpy_async(to + i, from + i, 4);
      }
    } else {
      for (int32_t i = threadIdx.x; i < size; i += kAugmentThreads) to[i] = from[i];
    }
  }
}

// What usual labels are: they come while pixels are made.
__device__ inline void stage_labels(const Augment& job, Shared& shared, int count) {
  const int i = threadIdx.x;
  if (i < count && shared.image[i] >= 0) {
    __pipeline_memcpy_async(shared.label + i, job.labels + 8 * shared.image[i], 8);
  }
}

// Which images, their bytes in shared memory, and what each of them draws. Nothing waits for memory
// or for other blocks but for the image's bytes: the rest is left to end_block.
__device__ inline Block begin_block(const Augment& job, const Plan& plan, Shared& shared) {
  const Augmentation& a = job.augmentation;
  const int64_t first = static_cast<int64_t>(blockIdx.x / plan.parts) * plan.block_samples;
  const Block block{first,
                    static_cast<int>(min(static_cast<int64_t>(plan.block_samples), job.n - first)),
                    static_cast<int>(blockIdx.x % plan.parts)};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < block.count) {
    const Cursor cursor =
        job.cursor ? *job.cursor
                   : Cursor{static_cast<int64_t>(job.seed), static_cast<int64_t>(job.epoch), 0, 0};
    const int64_t image = image_of(job, cursor, first + threadIdx.x);
    shared.image[threadIdx.x] = image >= 0 && image < job.n_images ? image : -1;
    if (threadIdx.x == 0) {
      shared.cursor = cursor;
      shared.grey_units = 0;
    }
  }
  __syncthreads();
  if (plan.stage_stride) stage_images(job, plan, shared, block.count);
  if (plan.stages_labels) stage_labels(job, shared, block.count);
  __pipeline_commit();
  // A warp has one kind of step, and a lane one sample.
  for (int k = warp; k < a.n_steps; k += kAugmentWarps) {
    if (lane < block.count) {
      shared.draws[lane][k] = draw_step_of(a, k, shared.cursor, shared.image[lane]);
    }
  }
  __syncthreads();
  if (threadIdx.x < block.count) {
    build_sample(shared.sample[threadIdx.x], a, shared.draws[threadIdx.x]);
  }
  __pipeline_wait_prior(0);
  __syncthreads();
  if (job.cursor && threadIdx.x == kAugmentThreads - 1) move_cursor(job.cursor, job.n);
  return block;
}

__device__ inline void end_block(const Augment& job,
                                 const Plan& plan,
                                 const Shared& shared,
                                 const Block& block) {
  if (job.labels == nullptr || block.part != 0) return;
  if (plan.stages_labels) {
    const int i = threadIdx.x;
    if (i >= block.count) return;
    reinterpret_cast<uint64_t*>(job.out_labels)[block.first + i] =
        shared.image[i] < 0 ? ~uint64_t{0} : shared.label[i];
  } else if (plan.label_unit == 8) {
    copy_labels<uint64_t>(job, shared, block);
  } else {
    copy_labels<uint8_t>(job, shared, block);
  }
}

inline bool aligned(const void* p, int64_t size, int64_t unit) {
  return reinterpret_cast<uintptr_t>(p) % unit == 0 && size % unit == 0;
}

inline Plan plan_of(const Augment& job, int group, int multiprocessors) {
  const int64_t size = job.image_size();
  const int32_t groups = (job.out_pixels() + group - 1) / group;
  const int64_t stride = (size + 15) / 16 * 16;
  Plan plan{};
  const bool staged = stride <= kStageBytes;
  plan.block_samples = 1;
  if (!job.augmentation.jitters && staged) {
    const int64_t blocks = static_cast<int64_t>(multiprocessors) * kBlocksPerMultiprocessor;
    const int64_t most = std::min<int64_t>(kMaxBlockSamples, kStageBytes / stride);
    plan.block_samples =
        static_cast<int32_t>(std::clamp<int64_t>((job.n + blocks - 1) / blocks, 1, most));
  }
  // A part of an image has at least four turns, to be worth drawing the parameters again.
  plan.parts = 1;
  if (!job.augmentation.jitters && !staged)
    plan.parts = std::max(1, groups / (4 * kAugmentThreads));
  plan.stage_stride = staged ? static_cast<int32_t>(stride) : 0;
  plan.load_bytes = aligned(job.images, size, 16) ? 16 : aligned(job.images, size, 4) ? 4 : 1;
  const bool wide =
      aligned(job.labels, job.label_bytes, 8) && aligned(job.out_labels, job.label_bytes, 8);
  plan.label_unit = wide ? 8 : 1;
  plan.stages_labels = wide && job.labels != nullptr && job.label_bytes == 8;
  return plan;
}

}  // namespace torch_renaissance
