// SPDX-License-Identifier: BSD-3-Clause
// Batch normalisation of tensors: their sizes, scratch memory and tickets, then the launch on the
// current stream of their device.
#pragma once

#include <ATen/core/Tensor.h>

#include "batch_norm.h"
#include "last_node.h"

namespace torch_renaissance {

// `n` but for what `x`, its input, says of sizes and dtype, which are filled in. Returns the kernel
// that writes the output where it is a node of a graph that is being captured.
CapturedNode launch_batch_norm(BatchNorm& n, const at::Tensor& x);
// `bias_grad`: where that of an `input_bias` is wanted, gets it if it is cheap.
void launch_batch_norm_backward(BatchNormBackward& n, const at::Tensor& x, at::Tensor* bias_grad);

// Whether the current stream is being captured, and nothing has followed this node.
bool is_last_node(const CapturedNode& node, at::Device device);

// In a capture: gives a kernel what `n` says now of `relu` and `residual`.
void set_batch_norm(const BatchNorm& n, const CapturedNode& kernel);

}  // namespace torch_renaissance
