// SPDX-License-Identifier: BSD-3-Clause
// Launches the update kernel for a rule, a dtype and a number of slots.
#include "update.cuh"

#include <cstring>

#include "../math/adam.h"
#include "../math/sgd.h"
#include "launch.h"

namespace torch_renaissance {
namespace {

// Most models fit the small one; the driver copies all of an argument, used or not.
constexpr int kFewSlots = 160;

template <typename R, int PLANES, typename scalar_t, int CAPACITY>
cudaError_t launch(const Update& u, cudaStream_t stream) {
  UpdateArguments<CAPACITY> a;
  int64_t blocks = 0;
  for (int i = 0; i < kMaxSegments; ++i) {
    a.segments[i] = i < u.n_segments ? u.segments[i] : Segment{};
    blocks += a.segments[i].n_chunks;
  }
  if (blocks == 0) return cudaSuccess;
  a.hyper = u.hyper;
  a.counters = u.counters;
  a.grad_scale = u.grad_scale;
  a.found_inf = u.found_inf;
  a.counts_skips = u.counts_skips;
  std::memcpy(a.slots, u.slots, u.n_slots * sizeof(Slot));
  update_kernel<R, PLANES, scalar_t, CAPACITY><<<blocks, kThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <typename R, int PLANES, typename scalar_t>
cudaError_t launch(const Update& u, cudaStream_t stream) {
  return u.n_slots <= kFewSlots ? launch<R, PLANES, scalar_t, kFewSlots>(u, stream)
                                : launch<R, PLANES, scalar_t, kMaxSlots>(u, stream);
}

// Without the last plane (amsgrad's maximum, SGD's momentum) nothing is loaded for it.
template <typename R, typename scalar_t>
cudaError_t launch(const Update& u, cudaStream_t stream) {
  bool last_plane = false;
  for (int i = 0; i < u.n_segments; ++i) {
    last_plane = last_plane || u.segments[i].planes[R::kPlanes - 1] != nullptr;
  }
  return last_plane ? launch<R, R::kPlanes, scalar_t>(u, stream)
                    : launch<R, R::kPlanes - 1, scalar_t>(u, stream);
}

template <typename R>
cudaError_t launch(const Update& u, cudaStream_t stream) {
  switch (u.dtype) {
    case ScalarType::kFloat:
      return launch<R, float>(u, stream);
    case ScalarType::kDouble:
      return launch<R, double>(u, stream);
    case ScalarType::kHalf:
      return launch<R, __half>(u, stream);
    case ScalarType::kBFloat16:
      return launch<R, __nv_bfloat16>(u, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t update_cuda(const Update& u, cudaStream_t stream) {
  return u.rule == Rule::kAdam ? launch<AdamRule>(u, stream) : launch<SgdRule>(u, stream);
}

}  // namespace torch_renaissance
