// SPDX-License-Identifier: BSD-3-Clause
// order, the op that tells which samples a batch consists of, and place_cursor_, which says where a
// run stands: schemas, checks and registration.
#include "order.h"

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <limits>

#ifdef TR_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/order.h"
#endif

namespace torch_renaissance {

Order checked_order(const char* op,
                    int64_t count,
                    bool shuffle,
                    int64_t rank,
                    int64_t world_size,
                    int64_t size) {
  TORCH_CHECK(0 <= rank && rank < world_size && world_size <= std::numeric_limits<int32_t>::max(),
              op,
              ": rank must be from 0 to world_size - 1, got rank ",
              rank,
              " and world_size ",
              world_size);
  TORCH_CHECK(size >= 0, op, ": size must be at least 0, got ", size);
  TORCH_CHECK(count >= 1 || (count == 0 && size == 0),
              op,
              ": count is ",
              count,
              ", but a batch of ",
              size,
              " needs samples to draw from");
  return {count, static_cast<int32_t>(rank), static_cast<int32_t>(world_size), shuffle};
}

namespace {

void check_cursor(const char* op, const at::Tensor& cursor) {
  TORCH_CHECK(cursor.scalar_type() == at::kLong && cursor.dim() == 1 && cursor.size(0) == 4 &&
                  cursor.is_contiguous(),
              op,
              ": cursor must be a contiguous int64 vector of 4 numbers (seed, epoch, position "
              "and 0), got ",
              cursor.scalar_type(),
              " of shape ",
              cursor.sizes());
}

at::Tensor order(const at::Tensor& cursor,
                 int64_t count,
                 bool shuffle,
                 int64_t rank,
                 int64_t world_size,
                 int64_t size) {
  const Order how = checked_order("order", count, shuffle, rank, world_size, size);
  check_cursor("order", cursor);
  at::Tensor out = at::empty({size}, cursor.options());
  if (size == 0 || cursor.is_meta()) return out;
  const OrderBatch b{
      static_cast<const Cursor*>(cursor.const_data_ptr()), how, size, out.data_ptr<int64_t>()};
#ifdef TR_WITH_CUDA
  if (cursor.is_cuda()) {
    const c10::cuda::CUDAGuard guard(cursor.device());
    C10_CUDA_CHECK(order_cuda(b, c10::cuda::getCurrentCUDAStream()));
    return out;
  }
#endif
  order_cpu(b);
  return out;
}

// The numbers travel as a kernel's arguments: the host may go on to the next ones.
void place_cursor_(const at::Tensor& cursor, int64_t seed, int64_t epoch, int64_t position) {
  check_cursor("place_cursor_", cursor);
  if (cursor.is_meta()) return;
  cursor.unsafeGetTensorImpl()->bump_version();  // no autograd kernel does it for this op
  const auto to = static_cast<Cursor*>(cursor.data_ptr());
  const Cursor place{seed, epoch, position, 0};
#ifdef TR_WITH_CUDA
  if (cursor.is_cuda()) {
    const c10::cuda::CUDAGuard guard(cursor.device());
    C10_CUDA_CHECK(place_cursor_cuda(to, place, c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  *to = place;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def(
      "order(Tensor cursor, int count, bool shuffle, int rank, int world_size, int size) -> "
      "Tensor");
  m.def("place_cursor_(Tensor(a!) cursor, int seed, int epoch, int position) -> ()");
}

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) {
  m.impl("order", order);
  m.impl("place_cursor_", place_cursor_);
}
#ifdef TR_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) {
  m.impl("order", order);
  m.impl("place_cursor_", place_cursor_);
}
#endif
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("order", order);
  m.impl("place_cursor_", place_cursor_);
}

}  // namespace torch_renaissance
