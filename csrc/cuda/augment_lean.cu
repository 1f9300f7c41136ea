// SPDX-License-Identifier: BSD-3-Clause
// The augmentations that data sets of small images usually have, without the cases that they don't
// need: every pixel costs less than half, with the same bits (math/augment_black.h).
#include "../math/augment_black.h"
#include "augment.h"
#include "augment_block.cuh"
#include "augment_store.cuh"

namespace torch_renaissance {
namespace {

constexpr int kGroup = 4;   // pixels of a row that a thread makes at a time
constexpr int kFrames = 2;  // that a sampled pixel may have to lie in

template <bool SAMPLED, int C>
__device__ __forceinline__ void make_group(const Augment& job,
                                           const Sample& sample,
                                           int32_t base,
                                           int64_t i,
                                           int32_t y,
                                           int32_t x0) {
  const Augmentation& a = job.augmentation;
  const Map& m = sample.map;
  const Source s = source_of(job, stage);
  const Affine first = m.frames[0].map, second = m.frames[1].map;
  const bool framed = m.n_frames > 1;
  const bool erasing =
      static_cast<uint32_t>(y - sample.erased[0]) < static_cast<uint32_t>(sample.erased[2]);
  const int32_t left = sample.erased[1], width = erasing ? sample.erased[3] : 0;
  const int32_t sy = m.shift.y_step * y + m.shift.y_start;
  const bool row_seen = m.seen.y.holds(sy);
  const auto read = [base](int32_t at) { return stage[base + at]; };
  float values[C][kGroup];
#pragma unroll
  for (int k = 0; k < kGroup; ++k) {
    const int32_t x = x0 + k;
    float v[C];
    if constexpr (SAMPLED) {
      const auto px = static_cast<float>(x0) + static_cast<float>(k);
      sample_on_black(m, s, first, second, framed, px, static_cast<float>(y), read, v);
    } else {
      const int32_t sx = m.shift.x_step * x + m.shift.x_start;
      const bool seen = row_seen && m.seen.x.holds(sx);
      const int32_t at = base + sy * s.row + sx * s.column;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        v[c] = seen ? float_of(stage[at + c * s.channel]) : a.fill[c];
      }
    }
    const bool erased = static_cast<uint32_t>(x - left) < static_cast<uint32_t>(width);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      values[c][k] = erased ? a.erased[c] : v[c] * a.scale[c] + a.bias[c];
    }
  }
  store_group(job, values, i, y * a.out_width + x0, job.out_pixels());
}

template <int C>
__device__ void make_nothing(const Augment& job, int64_t i, int32_t first) {
  float values[C][kGroup];
  for (int c = 0; c < C; ++c) {
    for (int k = 0; k < kGroup; ++k) values[c][k] = nan_of_device();
  }
  store_group(job, values, i, first, job.out_pixels());
}

template <bool SAMPLED, int C>
__global__ void __launch_bounds__(kAugmentThreads, kBlocksPerMultiprocessor)
    augment_lean_kernel(const __grid_constant__ Augment job, const __grid_constant__ Plan plan) {
  __shared__ Shared shared;
  const Block block = begin_block(job, plan, shared);
  const int32_t in_row = job.augmentation.out_width / kGroup;
  const int32_t groups = in_row * job.augmentation.out_height;
  for (int32_t i = threadIdx.x; i < block.count * groups; i += kAugmentThreads) {
    const int32_t s = i / groups, group = i - s * groups, y = group / in_row;
    if (shared.image[s] < 0) {
      make_nothing<C>(job, block.first + s, group * kGroup);
    } else {
      make_group<SAMPLED, C>(job,
                             shared.sample[s],
                             s * plan.stage_stride,
                             block.first + s,
                             y,
                             (group - y * in_row) * kGroup);
    }
  }
  end_block(job, plan, shared, block);
}

template <bool SAMPLED, int C>
cudaError_t launch(const Augment& job, cudaStream_t stream) {
  const Plan plan = plan_of(job, kGroup, multiprocessors());
  const int64_t blocks = (job.n + plan.block_samples - 1) / plan.block_samples;
  const int bytes = plan.stage_stride * plan.block_samples;
  augment_lean_kernel<SAMPLED, C><<<blocks, kAugmentThreads, bytes, stream>>>(job, plan);
  return cudaGetLastError();
}

template <int C>
cudaError_t launch(const Augment& job, cudaStream_t stream) {
  return job.augmentation.whole_pixels ? launch<false, C>(job, stream)
                                       : launch<true, C>(job, stream);
}

}  // namespace

bool is_lean(const Augment& job) {
  const Augmentation& a = job.augmentation;
  bool black = true;
  for (int c = 0; c < a.channels; ++c) black = black && a.fill[c] == 0.0f;
  int samplings = 0;
  for (int i = 0; i < a.n_steps; ++i) {
    const Step& step = a.steps[i];
    if (step.kind == StepKind::kResize || step.kind == StepKind::kResizedCrop) return false;
    if (step.mode != PadMode::kConstant) return false;
    const bool samples = step.kind == StepKind::kRotation || step.kind == StepKind::kScale;
    // The last frame counts only where a later step looks beyond it.
    if (samplings > 0 && samples + samplings > kFrames) return false;
    if (samplings == kFrames && step.kind < StepKind::kColorJitter) return false;
    samplings += samples;
  }
  return (a.channels == 1 || a.channels == 3) && !a.jitters && job.image_size() <= kStageBytes &&
         a.out_width % kGroup == 0 && (a.whole_pixels || (black && !a.nearest));
}

cudaError_t augment_lean_cuda(const Augment& job, cudaStream_t stream) {
  return job.augmentation.channels == 1 ? launch<1>(job, stream) : launch<3>(job, stream);
}

}  // namespace torch_renaissance
