// SPDX-License-Identifier: BSD-3-Clause
// Raw-pointer launchers of the cross entropy. They return the launch's status; none synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "../cross_entropy.h"
#include "tickets.h"

namespace torch_renaissance {

// What blocks leave for the last one of them.
struct CrossEntropyScratch {
  double* partial_sums;  // [blocks, 2]
  int32_t* ticket;       // zero; null: the device's own
  int ticket_number;     // which of the device's own
};

// How many blocks forward will have. With one, it needs no scratch.
int64_t cross_entropy_blocks(const CrossEntropy& c);

cudaError_t cross_entropy_forward_cuda(const CrossEntropy& c,
                                       const CrossEntropyScratch& scratch,
                                       cudaStream_t stream);

cudaError_t cross_entropy_backward_cuda(const CrossEntropy& c, cudaStream_t stream);

}  // namespace torch_renaissance
