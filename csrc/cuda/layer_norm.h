// SPDX-License-Identifier: BSD-3-Clause
// Raw-pointer launchers of layer normalisation. They return the launch's status.
#pragma once

#include <cuda_runtime_api.h>

#include "../layer_norm.h"

namespace torch_renaissance {

// How many blocks leave sums for the gradients of vectors, on the current device.
int layer_norm_blocks(int64_t rows);

// Sums that blocks leave: of the gradients of weight, bias and branch_bias.
inline constexpr int kLayerNormSums = 3;

cudaError_t layer_norm_cuda(const LayerNorm& n, cudaStream_t stream);
// `partials`: [blocks, kLayerNormSums, channels].
cudaError_t layer_norm_backward_cuda(const LayerNormBackward& n,
                                     int blocks,
                                     float* partials,
                                     cudaStream_t stream);

}  // namespace torch_renaissance
