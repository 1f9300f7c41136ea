// SPDX-License-Identifier: BSD-3-Clause
// The ops of max pooling, which TrainStep puts in the place of torch's in what torch.compile
// compiles, and what a compiler needs to know of them. A GPU alone has kernels for them.
#include "max_pool.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <tuple>

namespace torch_renaissance {
namespace {

at::Tensor empty_images(const at::Tensor& like,
                        at::ScalarType dtype,
                        const c10::SymInt& rows,
                        const c10::SymInt& columns) {
  return at::empty_symint({like.sym_size(0), like.sym_size(1), rows, columns},
                          like.options().dtype(dtype),
                          at::MemoryFormat::ChannelsLast);
}

std::tuple<at::Tensor, at::Tensor> max_pool2d_forward_meta(const at::Tensor& input,
                                                           at::IntArrayRef kernel_size,
                                                           at::IntArrayRef stride,
                                                           at::IntArrayRef padding,
                                                           bool ceil_mode) {
  int64_t pooled[2];
  for (int d : {0, 1}) {
    pooled[d] = count_windows(input.size(2 + d),
                              static_cast<int>(kernel_size[d]),
                              static_cast<int>(stride[d]),
                              static_cast<int>(padding[d]),
                              ceil_mode);
  }
  return {empty_images(input, input.scalar_type(), pooled[0], pooled[1]),
          empty_images(input, at::kByte, pooled[0], pooled[1])};
}

at::Tensor max_pool2d_backward_meta(const at::Tensor& grad,
                                    const at::Tensor& positions,
                                    at::IntArrayRef size,
                                    at::IntArrayRef kernel_size,
                                    at::IntArrayRef stride,
                                    at::IntArrayRef padding) {
  return empty_images(positions, grad.scalar_type(), size[0], size[1]);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def(
      "max_pool2d_forward(Tensor input, int[2] kernel_size, int[2] stride, int[2] padding, "
      "bool ceil_mode) -> (Tensor output, Tensor positions)");
  m.def(
      "max_pool2d_backward(Tensor grad, Tensor positions, int[2] size, int[2] kernel_size, "
      "int[2] stride, int[2] padding) -> Tensor");
}

TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("max_pool2d_forward", max_pool2d_forward_meta);
  m.impl("max_pool2d_backward", max_pool2d_backward_meta);
}

}  // namespace torch_renaissance
