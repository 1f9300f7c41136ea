// SPDX-License-Identifier: BSD-3-Clause
// The ops of tr.data's augmentation: schemas, checks, outputs, and the launch on the images'
// device.
#include "augment_ops.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#ifdef TR_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/augment.h"
#endif

namespace torch_renaissance {

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

Augment describe_augment(const AugmentProgram& p, const at::Tensor& images, const at::Tensor& out) {
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

void launch_augment(const Augment& job, const at::Tensor& images) {
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

namespace {

using Pair = std::tuple<at::Tensor, at::Tensor>;

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
  Augment job = describe_augment(p, images, out);
  job.indices = indices.const_data_ptr<int64_t>();
  job.seed = static_cast<uint64_t>(seed);
  job.epoch = static_cast<uint64_t>(epoch);
  if (images.is_cpu()) check_indices(op, job, {});
  launch_augment(job, images);
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

// What images `indices` draw for each step: the fields of Draw.
Pair augment_parameters(const at::Tensor& indices,
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

Pair augment_parameters_meta(const at::Tensor& indices,
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
      "augment_parameters(Tensor indices, int seed, int epoch, int[] program, float[] values) -> "
      "(Tensor integers, Tensor reals)");
}

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) {
  m.impl("augment", augment);
  m.impl("augment_parameters", augment_parameters);
}
#ifdef TR_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) { m.impl("augment", augment); }
#endif
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("augment", augment_meta);
  m.impl("augment_parameters", augment_parameters_meta);
}

}  // namespace torch_renaissance
