// SPDX-License-Identifier: BSD-3-Clause
// The bias of a convolution, which batch normalisation may take over.
#pragma once

#include <cuda_runtime_api.h>

#include "../channel_bias.h"
#include "last_node.h"

namespace at {
class Tensor;
}

namespace torch_renaissance {

cudaError_t channel_bias_cuda(const ChannelBias& b, cudaStream_t stream);
cudaError_t set_channel_bias_cuda(const ChannelBias& b, cudaGraphNode_t node);

// Adds a bias to a convolution's output on the current stream. False, and nothing is done, where
// they are not what the kernel takes.
bool add_channel_bias(const at::Tensor& output, const at::Tensor& bias);

// The bias' gradient, which came with `grad`, that of the output: kept until it is asked for, as
// long as that is still the same tensor. Undefined where there is none.
void keep_bias_grad(const at::Tensor& grad, const at::Tensor& bias_grad);
at::Tensor take_bias_grad(const at::Tensor& grad);
void drop_bias_grad();

// The latest that this thread has captured: its node, and what the node does.
struct CapturedBias {
  CapturedNode node;
  ChannelBias bias;
};
inline thread_local CapturedBias captured_bias;

}  // namespace torch_renaissance
