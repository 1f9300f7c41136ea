// SPDX-License-Identifier: BSD-3-Clause
// The ops of tr.data's augmentation: schemas, checks, outputs, and the launch on the images'
// device.
#include "augment.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "augment_program.h"
#include "order.h"

#ifdef TR_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/augment.h"
#endif

namespace torch_renaissance {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// -- Checks

void check_images(const char* op, const at::Tensor& images, const Augmentation& a) {
  TORCH_CHECK(images.scalar_type() == at::kByte && images.dim() == 4,
              op,
              ": images must be uint8 of shape [N, C, H, W], got ",
              images.scalar_type(),
              " with ",
              images.dim(),
              " dimensions");
  TORCH_CHECK(
      images.size(1) == a.channels && images.size(2) == a.height && images.size(3) == a.width,
      op,
      ": images has shape ",
      images.sizes(),
      ", but its program was made for images of ",
      a.channels,
      " x ",
      a.height,
      " x ",
      a.width);
  TORCH_CHECK(images.is_contiguous() || images.is_contiguous(at::MemoryFormat::ChannelsLast),
              op,
              ": images must be contiguous, as NCHW or channels_last, got strides ",
              images.strides(),
              "; call .contiguous() on it once");
}

// A dense vector of int64 beside the images.
void check_vector(const char* op, const char* name, const at::Tensor& t, const at::Tensor& images) {
  TORCH_CHECK(t.scalar_type() == at::kLong && t.dim() == 1 && t.is_contiguous() &&
                  t.device() == images.device(),
              op,
              ": ",
              name,
              " must be a contiguous int64 vector on ",
              images.device(),
              ", got ",
              t.scalar_type(),
              " of shape ",
              t.sizes(),
              " on ",
              t.device());
}

// -- What a device is told

at::Tensor empty_batch(const AugmentProgram& p, c10::SymInt n, const at::Tensor& images) {
  const Augmentation& a = p.augmentation;
  return at::empty_symint(
      {std::move(n), a.channels, a.out_height, a.out_width},
      images.options().dtype(torch_dtype(p.dtype)),
      p.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous);
}

Augment describe(const AugmentProgram& p, const at::Tensor& images, const at::Tensor& out) {
  Augment job{};
  job.augmentation = p.augmentation;
  job.images = images.const_data_ptr<uint8_t>();
  job.n_images = images.size(0);
  job.channels_last = !images.is_contiguous();
  job.out = out.data_ptr();
  job.n = out.size(0);
  job.dtype = p.dtype;
  job.out_channels_last = p.channels_last;
  return job;
}

void launch(const Augment& job, const at::Tensor& images) {
  if (job.n == 0) return;
#ifdef TR_WITH_CUDA
  if (images.is_cuda()) {
    const c10::cuda::CUDAGuard guard(images.device());
    C10_CUDA_CHECK(augment_cuda(job, c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  augment_cpu(job);
}

// On a CPU. On a GPU it would need to wait; there a bad index gives a sample of NaN.
void check_indices(const char* op, const Augment& job, const Cursor& cursor) {
  for (int64_t i = 0; i < job.n; ++i) {
    const int64_t image = image_of(job, cursor, i);
    TORCH_CHECK_INDEX(0 <= image && image < job.n_images,
                      op,
                      ": sample ",
                      i,
                      " of the batch is image ",
                      image,
                      ", but there are ",
                      job.n_images,
                      " images, counted from 0");
  }
}

// -- Ops

at::Tensor augment(const at::Tensor& images,
                   const at::Tensor& indices,
                   int64_t seed,
                   int64_t epoch,
                   at::IntArrayRef program,
                   at::ArrayRef<double> values) {
  const char* op = "augment";
  const AugmentProgram p = read_program(op, program, values);
  check_images(op, images, p.augmentation);
  check_vector(op, "indices", indices, images);
  at::Tensor out = empty_batch(p, indices.size(0), images);
  Augment job = describe(p, images, out);
  job.indices = indices.const_data_ptr<int64_t>();
  job.seed = static_cast<uint64_t>(seed);
  job.epoch = static_cast<uint64_t>(epoch);
  if (images.is_cpu()) check_indices(op, job, {});
  launch(job, images);
  return out;
}

at::Tensor augment_meta(const at::Tensor& images,
                        const at::Tensor& indices,
                        int64_t,
                        int64_t,
                        at::IntArrayRef program,
                        at::ArrayRef<double> values) {
  return empty_batch(read_program("augment", program, values), indices.sym_size(0), images);
}

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
    Augment job = describe(program, images, x);
    job.cursor = static_cast<Cursor*>(cursor.data_ptr());
    job.order = order;
    job.subset = subset.has_value() ? subset->const_data_ptr<int64_t>() : nullptr;
    job.labels = static_cast<const uint8_t*>(labels.const_data_ptr());
    job.out_labels = static_cast<uint8_t*>(y.data_ptr());
    job.label_bytes = job.n ? y.numel() / job.n * y.element_size() : 0;
    if (images.is_cpu()) check_indices(op, job, *job.cursor);
    cursor.unsafeGetTensorImpl()->bump_version();  // no autograd kernel does it for this op
    launch(job, images);
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

// What images `indices` draw for each step: the fields of Draw.
Batch augment_parameters(const at::Tensor& indices,
                         int64_t seed,
                         int64_t epoch,
                         at::IntArrayRef program,
                         at::ArrayRef<double> values) {
  const char* op = "augment_parameters";
  const Augmentation a = read_program(op, program, values).augmentation;
  check_vector(op, "indices", indices, indices);
  const int64_t n = indices.size(0);
  at::Tensor integers = at::empty({n, a.n_steps, 4}, indices.options().dtype(at::kInt));
  at::Tensor reals = at::empty({n, a.n_steps, 4}, indices.options().dtype(at::kFloat));
  const auto index = indices.const_data_ptr<int64_t>();
  auto integer = integers.data_ptr<int32_t>();
  auto real = reals.data_ptr<float>();
  for (int64_t i = 0; i < n * a.n_steps; ++i) {
    const Draw d =
        draw_step_of(a, static_cast<int>(i % a.n_steps), {seed, epoch, 0, 0}, index[i / a.n_steps]);
    for (int k = 0; k < 4; ++k) {
      integer[4 * i + k] = d.integer[k];
      real[4 * i + k] = d.real[k];
    }
  }
  return {integers, reals};
}

Batch augment_parameters_meta(const at::Tensor& indices,
                              int64_t,
                              int64_t,
                              at::IntArrayRef program,
                              at::ArrayRef<double> values) {
  const Augmentation a = read_program("augment_parameters", program, values).augmentation;
  const auto empty = [&](at::ScalarType dtype) {
    return at::empty_symint({indices.sym_size(0), a.n_steps, 4}, indices.options().dtype(dtype));
  };
  return {empty(at::kInt), empty(at::kFloat)};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def(
      "augment(Tensor images, Tensor indices, int seed, int epoch, int[] program, float[] values) "
      "-> Tensor");
  m.def(
      "draw_batch(Tensor images, Tensor labels, Tensor? subset, Tensor(a!) cursor, int size, "
      "int count, bool shuffle, int rank, int world_size, int[] program, float[] values) "
      "-> (Tensor, Tensor)");
  m.def(
      "draw_batch_(Tensor(a!) x, Tensor(b!) y, Tensor images, Tensor labels, Tensor? subset, "
      "Tensor(c!) cursor, int count, bool shuffle, int rank, int world_size, int[] program, "
      "float[] values) -> ()");
  m.def(
      "augment_parameters(Tensor indices, int seed, int epoch, int[] program, float[] values) -> "
      "(Tensor integers, Tensor reals)");
}

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) {
  m.impl("augment", augment);
  m.impl("draw_batch", draw_batch);
  m.impl("draw_batch_", draw_batch_);
  m.impl("augment_parameters", augment_parameters);
}
#ifdef TR_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) {
  m.impl("augment", augment);
  m.impl("draw_batch", draw_batch);
  m.impl("draw_batch_", draw_batch_);
}
#endif
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("augment", augment_meta);
  m.impl("draw_batch", draw_batch_meta);
  m.impl("draw_batch_", draw_batch_meta_);
  m.impl("augment_parameters", augment_parameters_meta);
}

}  // namespace torch_renaissance
