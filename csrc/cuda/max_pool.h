// SPDX-License-Identifier: BSD-3-Clause
// Raw-pointer launchers of max pooling. They return the launch's status; none synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "../max_pool.h"

namespace torch_renaissance {

// Vectors of channels in a row, of the input or the output, that a grid has room for.
inline constexpr int64_t kMostPoolVectors = 65535 * 256;

cudaError_t max_pool_forward_cuda(const MaxPool& p, cudaStream_t stream);
cudaError_t max_pool_backward_cuda(const MaxPool& p, cudaStream_t stream);

}  // namespace torch_renaissance
