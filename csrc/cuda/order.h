// SPDX-License-Identifier: BSD-3-Clause
// The launcher of order. It returns the launch's status and does not synchronise.
#pragma once

#include <cuda_runtime_api.h>

#include "../order.h"

namespace torch_renaissance {

cudaError_t order_cuda(const OrderBatch& b, cudaStream_t stream);

}  // namespace torch_renaissance
