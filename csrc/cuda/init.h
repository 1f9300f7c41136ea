// SPDX-License-Identifier: BSD-3-Clause
// The launcher of fill_random_. It returns the launch's status and does not synchronise.
#pragma once

#include <cuda_runtime_api.h>

#include "../init.h"

namespace torch_renaissance {

cudaError_t fill_random_cuda(const Fill& f, cudaStream_t stream);

}  // namespace torch_renaissance
