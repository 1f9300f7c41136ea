// SPDX-License-Identifier: BSD-3-Clause
// The update with clipping, unscaling, 16-bit gradients, averages and 16-bit copies in its pass.
#include "update_launch.cuh"

namespace torch_renaissance {

cudaError_t update_with_extras_cuda(const Update& u, cudaStream_t stream) {
  switch (u.dtype) {
    case ScalarType::kFloat:
      return launch_update<true, float>(u, stream);
    case ScalarType::kDouble:
      return launch_update<true, double>(u, stream);
    case ScalarType::kHalf:
      return launch_update<true, __half>(u, stream);
    case ScalarType::kBFloat16:
      return launch_update<true, __nv_bfloat16>(u, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torch_renaissance
