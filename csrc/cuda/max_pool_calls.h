// SPDX-License-Identifier: BSD-3-Clause
// What max pooling's kernels make of a call of torch.nn.functional.max_pool2d.
#pragma once

#include <ATen/core/Tensor.h>

#include "max_pool.h"

namespace torch_renaissance {

inline constexpr auto kPoolFormat = at::MemoryFormat::ChannelsLast;

at::Tensor empty_pooled(at::IntArrayRef sizes, const at::Tensor& like, at::ScalarType dtype);

// Fills in sizes. False where the kernels don't take the call.
bool describe_pool(const at::Tensor& input,
                   at::IntArrayRef kernel_size,
                   at::IntArrayRef stride,
                   at::IntArrayRef padding,
                   at::IntArrayRef dilation,
                   bool ceil_mode,
                   MaxPool& p);

}  // namespace torch_renaissance
