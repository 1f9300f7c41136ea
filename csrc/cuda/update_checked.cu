// SPDX-License-Identifier: BSD-3-Clause
// Norm and update in one cooperative launch, for what small models usually do: float32 weights,
// SGD or Adam without amsgrad.
#include <algorithm>

#include "update_launch.cuh"

namespace torch_renaissance {
namespace {

template <typename R, int PLANES, int SLOTS, int SEGMENTS>
cudaError_t launch_checked(const Norm& n, const Update& u, cudaStream_t stream, bool& fits) {
  using Arguments = CheckedArguments<SLOTS, SEGMENTS>;
  const auto kernel = update_kernel<R, PLANES, true, float, Arguments>;
  Arguments a;
  const int64_t blocks = describe(a, u);
  a.check = {n.chain, n.partials, n.loss_scale, n.growth_tracker};
  int at_once = 0;  // on one multiprocessor
  const cudaError_t error =
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&at_once, kernel, a.kUpdateThreads, 0);
  if (error != cudaSuccess) return error;
  fits = blocks > 0 &&
         blocks <= std::min<int64_t>(int64_t{at_once} * multiprocessors(), kNormPartials);
  if (!fits) return cudaSuccess;
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeCooperative;
  attribute.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(a.kUpdateThreads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, a);
  // A share of a device (MPS) has fewer multiprocessors than it says; some have no such launches.
  if (launched == cudaErrorCooperativeLaunchTooLarge || launched == cudaErrorNotSupported) {
    cudaGetLastError();
    fits = false;
    return cudaSuccess;
  }
  return launched;
}

template <typename R, int PLANES>
cudaError_t launch_checked(const Norm& n, const Update& u, cudaStream_t stream, bool& fits) {
  if (u.n_slots <= kTinySlots && u.n_segments <= kTinySegments) {
    return launch_checked<R, PLANES, kTinySlots, kTinySegments>(n, u, stream, fits);
  }
  return launch_checked<R, PLANES, kFewSlots, kMaxSegments>(n, u, stream, fits);
}

}  // namespace

cudaError_t checked_update_cuda(const Norm& n, const Update& u, cudaStream_t stream, bool& fits) {
  fits = false;
  if (u.dtype != ScalarType::kFloat || u.n_slots > kFewSlots || !n.first || !n.last) {
    return cudaSuccess;
  }
  for (int i = 0; i < u.n_segments; ++i) {
    if (u.rule == Rule::kAdam && u.segments[i].planes[2] != nullptr) return cudaSuccess;
  }
  if (u.rule == Rule::kAdam) return launch_checked<AdamRule, 2>(n, u, stream, fits);
  if (u.rule == Rule::kSgd) return launch_checked<SgdRule, 1>(n, u, stream, fits);
  return cudaSuccess;
}

}  // namespace torch_renaissance
