// SPDX-License-Identifier: BSD-3-Clause
// Raw-pointer launchers of what is done with columns. They return the launch's status.
#pragma once

#include "../columns.h"
#include "batch_norm.h"

namespace torch_renaissance {

cudaError_t gelu_cuda(const Columns& c, const NormTiling& tiling, cudaStream_t stream);
cudaError_t gelu_backward_cuda(const Columns& c,
                               const NormTiling& tiling,
                               const NormScratch& scratch,
                               cudaStream_t stream);
cudaError_t pack_heads_cuda(const Heads& h,
                            const NormTiling& tiling,
                            const NormScratch& scratch,
                            cudaStream_t stream);
cudaError_t column_sums_cuda(const Columns& c,
                             const NormTiling& tiling,
                             const NormScratch& scratch,
                             cudaStream_t stream);

}  // namespace torch_renaissance
