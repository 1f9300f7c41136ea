// SPDX-License-Identifier: BSD-3-Clause
// Raw-pointer launchers. They return the launch's status; none of them synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "../copies.h"
#include "../update.h"

namespace torch_renaissance {

cudaError_t update_cuda(const Update& u, cudaStream_t stream);
cudaError_t update_with_extras_cuda(const Update& u, cudaStream_t stream);

cudaError_t norm_cuda(const Norm& n, cudaStream_t stream);
cudaError_t lars_norms_cuda(const Norm& n, cudaStream_t stream);  // two launches

cudaError_t copy_cuda(const Copies& c, cudaStream_t stream);

// Writes `count` values to device memory as kernel arguments: no host buffer, so no race.
cudaError_t write_values_cuda(double* to, const double* values, int64_t count, cudaStream_t stream);

// Puts gradients into planes[0] of each segment, or adds them; where a gradient is null, zeros.
cudaError_t pack_cuda(const Pack& p, cudaStream_t stream);

}  // namespace torch_renaissance
