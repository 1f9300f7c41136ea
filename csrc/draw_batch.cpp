// SPDX-License-Identifier: BSD-3-Clause
// The ops that draw a batch of a resident dataset: which samples, augmented, with their labels.
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "augment_ops.h"
#include "order.h"

namespace torch_renaissance {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using Batch = std::tuple<at::Tensor, at::Tensor>;

// What a draw takes besides its outputs, checked for batches of `size`.
struct Drawn {
  const char* op;
  const at::Tensor &images, &labels;
  const OptionalTensor& subset;
  const at::Tensor& cursor;
  AugmentProgram program;
  Order order;

  Drawn(const char* name,
        const at::Tensor& from_images,
        const at::Tensor& from_labels,
        const OptionalTensor& from_subset,
        const at::Tensor& at_cursor,
        int64_t size,
        int64_t count,
        bool shuffle,
        int64_t rank,
        int64_t world_size,
        at::IntArrayRef ints,
        at::ArrayRef<double> values)
      : op(name),
        images(from_images),
        labels(from_labels),
        subset(from_subset),
        cursor(at_cursor),
        program(read_program(op, ints, values)),
        order(checked_order(op, count, shuffle, rank, world_size, size)) {
    check_images(op, images, program.augmentation);
    TORCH_CHECK(labels.dim() >= 1 && labels.size(0) == images.size(0) && labels.is_contiguous() &&
                    labels.device() == images.device(),
                op,
                ": labels must be contiguous, on ",
                images.device(),
                " and have ",
                images.size(0),
                " rows, as images, got shape ",
                labels.sizes(),
                " on ",
                labels.device());
    check_vector(op, "cursor", cursor, images);
    TORCH_CHECK(cursor.size(0) == 4, op, ": cursor must have 4 numbers, got ", cursor.size(0));
    if (subset.has_value()) check_vector(op, "subset", *subset, images);
    const int64_t available = subset.has_value() ? subset->size(0) : images.size(0);
    TORCH_CHECK(
        count <= available, op, ": count is ", count, ", but there are ", available, " samples");
  }

  // Into x and y, which fit.
  void into(const at::Tensor& x, const at::Tensor& y) const {
    Augment job = describe_augment(program, images, x);
    job.cursor = static_cast<Cursor*>(cursor.data_ptr());
    job.order = order;
    job.subset = subset.has_value() ? subset->const_data_ptr<int64_t>() : nullptr;
    job.labels = static_cast<const uint8_t*>(labels.const_data_ptr());
    job.out_labels = static_cast<uint8_t*>(y.data_ptr());
    job.label_bytes = job.n ? y.numel() / job.n * y.element_size() : 0;
    if (images.is_cpu()) check_indices(op, job, *job.cursor);
    cursor.unsafeGetTensorImpl()->bump_version();  // no autograd kernel does it for this op
    launch_augment(job, images);
  }
};

c10::SymDimVector label_shape(const at::Tensor& labels, c10::SymInt size) {
  c10::SymDimVector shape(labels.sym_sizes());
  shape[0] = std::move(size);
  return shape;
}

Batch draw_batch(const at::Tensor& images,
                 const at::Tensor& labels,
                 const OptionalTensor& subset,
                 const at::Tensor& cursor,
                 int64_t size,
                 int64_t count,
                 bool shuffle,
                 int64_t rank,
                 int64_t world_size,
                 at::IntArrayRef program,
                 at::ArrayRef<double> values) {
  const Drawn drawn("draw_batch",
                    images,
                    labels,
                    subset,
                    cursor,
                    size,
                    count,
                    shuffle,
                    rank,
                    world_size,
                    program,
                    values);
  Batch batch{empty_batch(drawn.program, size, images),
              at::empty_symint(label_shape(labels, size), labels.options())};
  drawn.into(std::get<0>(batch), std::get<1>(batch));
  return batch;
}

// What draw_batch would return, as far as a tensor can tell.
void check_output(const char* op,
                  const char* name,
                  const at::Tensor& t,
                  at::IntArrayRef shape,
                  at::ScalarType dtype,
                  at::MemoryFormat format,
                  const at::Tensor& images) {
  TORCH_CHECK(t.sizes() == shape && t.scalar_type() == dtype && t.device() == images.device() &&
                  t.is_contiguous(format),
              op,
              ": ",
              name,
              " must be ",
              dtype,
              " of shape ",
              shape,
              " on ",
              images.device(),
              ", contiguous as ",
              format,
              ", got ",
              t.scalar_type(),
              " of shape ",
              t.sizes(),
              " and strides ",
              t.strides(),
              " on ",
              t.device(),
              "; draw_batch makes such tensors");
}

void draw_batch_(const at::Tensor& x,
                 const at::Tensor& y,
                 const at::Tensor& images,
                 const at::Tensor& labels,
                 const OptionalTensor& subset,
                 const at::Tensor& cursor,
                 int64_t count,
                 bool shuffle,
                 int64_t rank,
                 int64_t world_size,
                 at::IntArrayRef program,
                 at::ArrayRef<double> values) {
  const char* op = "draw_batch_";
  TORCH_CHECK(x.dim() == 4, op, ": x must have 4 dimensions, as images, got ", x.dim());
  const int64_t size = x.size(0);
  const Drawn drawn(
      op, images, labels, subset, cursor, size, count, shuffle, rank, world_size, program, values);
  const AugmentProgram& p = drawn.program;
  const Augmentation& a = p.augmentation;
  check_output(op,
               "x",
               x,
               {size, a.channels, a.out_height, a.out_width},
               torch_dtype(p.dtype),
               p.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous,
               images);
  auto shape = labels.sizes().vec();
  shape[0] = size;
  check_output(op, "y", y, shape, labels.scalar_type(), at::MemoryFormat::Contiguous, images);
  for (const at::Tensor& t : {x, y}) t.unsafeGetTensorImpl()->bump_version();
  drawn.into(x, y);
}

void draw_batch_meta_(const at::Tensor& x,
                      const at::Tensor& y,
                      const at::Tensor& images,
                      const at::Tensor& labels,
                      const OptionalTensor&,
                      const at::Tensor& cursor,
                      int64_t,
                      bool,
                      int64_t,
                      int64_t,
                      at::IntArrayRef,
                      at::ArrayRef<double>) {
  // Real tensors among those on meta would be left alone in silence.
  for (const at::Tensor& t : {x, y, images, labels, cursor}) {
    TORCH_CHECK(t.is_meta(),
                "draw_batch_: all tensors must be on one device, got some on meta and one on ",
                t.device());
  }
}

Batch draw_batch_meta(const at::Tensor& images,
                      const at::Tensor& labels,
                      const OptionalTensor&,
                      const at::Tensor&,
                      int64_t size,
                      int64_t,
                      bool,
                      int64_t,
                      int64_t,
                      at::IntArrayRef program,
                      at::ArrayRef<double> values) {
  return {empty_batch(read_program("draw_batch", program, values), size, images),
          at::empty_symint(label_shape(labels, size), labels.options())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def(
      "draw_batch(Tensor images, Tensor labels, Tensor? subset, Tensor(a!) cursor, int size, "
      "int count, bool shuffle, int rank, int world_size, int[] program, float[] values) "
      "-> (Tensor, Tensor)");
  m.def(
      "draw_batch_(Tensor(a!) x, Tensor(b!) y, Tensor images, Tensor labels, Tensor? subset, "
      "Tensor(c!) cursor, int count, bool shuffle, int rank, int world_size, int[] program, "
      "float[] values) -> ()");
}

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) {
  m.impl("draw_batch", draw_batch);
  m.impl("draw_batch_", draw_batch_);
}
#ifdef TR_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) {
  m.impl("draw_batch", draw_batch);
  m.impl("draw_batch_", draw_batch_);
}
#endif
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("draw_batch", draw_batch_meta);
  m.impl("draw_batch_", draw_batch_meta_);
}

}  // namespace torch_renaissance
