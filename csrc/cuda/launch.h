// SPDX-License-Identifier: BSD-3-Clause
// Raw-pointer launchers. They return the launch's status; none of them synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "../copies.h"
#include "../update.h"

namespace torch_renaissance {

// Of the current device.
inline int multiprocessors() {
  int device = 0, count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

cudaError_t update_cuda(const Update& u, cudaStream_t stream);
cudaError_t update_with_extras_cuda(const Update& u, cudaStream_t stream);

cudaError_t norm_cuda(const Norm& n, cudaStream_t stream);
// Both. `fits`: whether one launch can do it; if not, nothing has been done.
cudaError_t checked_update_cuda(const Norm& n, const Update& u, cudaStream_t stream, bool& fits);
cudaError_t lars_norms_cuda(const Norm& n, cudaStream_t stream);  // two launches

// In a capture: adds a node. Then, in an instantiated graph: other copies for it.
cudaError_t capture_copy_cuda(const Copies& c, cudaStream_t stream, cudaGraphNode_t* node);
cudaError_t set_copy_cuda(const Copies& c, cudaGraphExec_t exec, cudaGraphNode_t node);

// Writes `count` values to device memory as kernel arguments: no host buffer, so no race.
cudaError_t write_values_cuda(double* to, const double* values, int64_t count, cudaStream_t stream);

// Puts gradients into planes[0] of each segment, or adds them; where a gradient is null, zeros.
cudaError_t pack_cuda(const Pack& p, cudaStream_t stream);

}  // namespace torch_renaissance
