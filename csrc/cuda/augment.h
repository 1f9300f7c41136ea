// SPDX-License-Identifier: BSD-3-Clause
// The launcher of augment and draw_batch. It returns the launch's status and does not synchronise.
#pragma once

#include <cuda_runtime_api.h>

#include "../augment.h"

namespace torch_renaissance {

// Whether it is one of those that augment_lean_cuda does: small images without colour, whose maps
// are by whole pixels or bilinear on black, in rows of whole groups of pixels.
bool is_lean(const Augment& job);
cudaError_t augment_lean_cuda(const Augment& job, cudaStream_t stream);

// One launch. With a cursor it also moves that on by the batch; see Note [Last block].
cudaError_t augment_cuda(const Augment& job, cudaStream_t stream);

}  // namespace torch_renaissance
