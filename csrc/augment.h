// SPDX-License-Identifier: BSD-3-Clause
// What augment and draw_batch do to a batch. Plain C++, for host and device, without torch's
// headers.
#pragma once

#include "math/augment.h"
#include "math/order.h"

namespace torch_renaissance {

enum class PixelType : int32_t { kByte, kFloat, kHalf, kBFloat16 };

// All images have the size that `augmentation` says, and lie densely: NCHW or channels last.
struct Augment {
  Augmentation augmentation;
  const uint8_t* images;
  int64_t n_images;
  bool channels_last;

  void* out;
  int64_t n;  // samples of the batch
  PixelType dtype;
  bool out_channels_last;

  // Which images: given, or drawn from where the cursor stands, by way of a subset where not null.
  const int64_t* indices;
  uint64_t seed, epoch;
  Cursor* cursor;  // null: indices, seed and epoch are given
  Order order;
  const int64_t* subset;

  const uint8_t* labels;  // null: there are none
  uint8_t* out_labels;
  int64_t label_bytes;

  TR_HOST_DEVICE int64_t image_size() const {
    return static_cast<int64_t>(augmentation.channels) * augmentation.height * augmentation.width;
  }
  TR_HOST_DEVICE int32_t out_pixels() const {
    return augmentation.out_height * augmentation.out_width;
  }
};

TR_HOST_DEVICE Source source_of(const Augment& job, const uint8_t* image) {
  const Augmentation& a = job.augmentation;
  if (job.channels_last) return {image, a.width * a.channels, a.channels, 1};
  return {image, a.width, 1, a.height * a.width};
}

// Of sample i of the batch. May be out of range: it is what the user's tensor says.
TR_HOST_DEVICE int64_t image_of(const Augment& job, const Cursor& cursor, int64_t i) {
  if (!job.cursor) return job.indices[i];
  const int64_t at = sample_at(job.order, cursor, job.n, i);
  return job.subset ? job.subset[at] : at;
}

// The size of the image that step i is applied to.
TR_HOST_DEVICE Draw draw_step_of(const Augmentation& a,
                                 int i,
                                 const Cursor& cursor,
                                 int64_t image) {
  const int32_t height = i ? a.steps[i - 1].height : a.height;
  const int32_t width = i ? a.steps[i - 1].width : a.width;
  return draw_step(a.steps[i],
                   height,
                   width,
                   static_cast<uint64_t>(cursor.seed),
                   static_cast<uint64_t>(cursor.epoch),
                   static_cast<uint64_t>(image));
}

void augment_cpu(const Augment& job);

}  // namespace torch_renaissance
