// SPDX-License-Identifier: BSD-3-Clause
// The update alone: the kernels that most steps take.
#include "update_launch.cuh"

namespace torch_renaissance {

cudaError_t update_cuda(const Update& u, cudaStream_t stream) {
  if (u.control != nullptr) return update_with_extras_cuda(u, stream);
  switch (u.dtype) {
    case ScalarType::kFloat:
      return launch_update<false, float>(u, stream);
    case ScalarType::kDouble:
      return launch_update<false, double>(u, stream);
    case ScalarType::kHalf:
      return launch_update<false, __half>(u, stream);
    case ScalarType::kBFloat16:
      return launch_update<false, __nv_bfloat16>(u, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace torch_renaissance
