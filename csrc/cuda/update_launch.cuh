// SPDX-License-Identifier: BSD-3-Clause
// Picks the kernel for a rule, a dtype and a number of slots. The driver copies all of an argument,
// used or not, so small models get a small one.
#pragma once

#include <cstring>

#include "../math/adam.h"
#include "../math/lars.h"
#include "../math/sgd.h"
#include "launch.h"
#include "update.cuh"

namespace torch_renaissance {

// Rare dtypes, and 16-bit ones with extras, have one size: it isn't worth compiling more.
template <bool EXTRAS, typename scalar_t>
inline constexpr bool kAllSizes =
    sizeof(scalar_t) == sizeof(float) || (!EXTRAS && sizeof(scalar_t) < sizeof(float));

// The same for all kernels of a size, of which there are many: not inlined into each launch.
template <typename Arguments>
__attribute__((noinline)) int64_t describe(Arguments& a, const Update& u) {
  int64_t blocks = 0;
  for (int i = 0; i < Arguments::kSegments; ++i) {
    a.segments[i] = i < u.n_segments ? u.segments[i] : Segment{};
    blocks += a.segments[i].n_chunks;
  }
  a.hyper = u.hyper;
  a.counters = u.counters;
  a.grad_scale = u.grad_scale;
  a.found_inf = u.found_inf;
  a.control = u.control;
  a.chain = u.chain;
  a.counts_skips = u.counts_skips;
  a.ends_step = u.ends_step;
  std::memcpy(a.slots, u.slots, u.n_slots * sizeof(Slot));
  return blocks;
}

template <typename R, int PLANES, bool EXTRAS, typename scalar_t, int SLOTS, int SEGMENTS>
cudaError_t launch_update(const Update& u, cudaStream_t stream) {
  UpdateArguments<SLOTS, SEGMENTS> a;
  const int64_t blocks = describe(a, u);
  if (blocks == 0) return cudaSuccess;
  update_kernel<R, PLANES, EXTRAS, scalar_t><<<blocks, a.kUpdateThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

template <typename R, int PLANES, bool EXTRAS, typename scalar_t>
cudaError_t launch_update(const Update& u, cudaStream_t stream) {
  if constexpr (kAllSizes<EXTRAS, scalar_t>) {
    if constexpr (sizeof(scalar_t) == sizeof(float)) {
      if (u.n_slots <= kTinySlots && u.n_segments <= kTinySegments) {
        return launch_update<R, PLANES, EXTRAS, scalar_t, kTinySlots, kTinySegments>(u, stream);
      }
    }
    if (u.n_slots <= kFewSlots) {
      return launch_update<R, PLANES, EXTRAS, scalar_t, kFewSlots, kMaxSegments>(u, stream);
    }
  }
  return launch_update<R, PLANES, EXTRAS, scalar_t, kMaxSlots, kMaxSegments>(u, stream);
}

// Without the last plane (amsgrad's maximum, SGD's momentum) nothing is loaded for it.
template <typename R, bool EXTRAS, typename scalar_t>
cudaError_t launch_update(const Update& u, cudaStream_t stream) {
  bool last_plane = false;
  for (int i = 0; i < u.n_segments; ++i) {
    last_plane = last_plane || u.segments[i].planes[R::kPlanes - 1] != nullptr;
  }
  // The rare ones take the larger kernel, which checks: it isn't worth compiling both.
  constexpr bool BOTH = kAllSizes<EXTRAS, scalar_t>;
  return last_plane ? launch_update<R, R::kPlanes, EXTRAS, scalar_t>(u, stream)
                    : launch_update<R, R::kPlanes - BOTH, EXTRAS, scalar_t>(u, stream);
}

template <bool EXTRAS, typename scalar_t>
cudaError_t launch_update(const Update& u, cudaStream_t stream) {
  if (u.rule == Rule::kLars) {  // a pass over the norms goes ahead, so it always has extras
    if constexpr (EXTRAS) return launch_update<LarsRule, EXTRAS, scalar_t>(u, stream);
    return cudaErrorInvalidValue;
  }
  return u.rule == Rule::kAdam ? launch_update<AdamRule, EXTRAS, scalar_t>(u, stream)
                               : launch_update<SgdRule, EXTRAS, scalar_t>(u, stream);
}

}  // namespace torch_renaissance
