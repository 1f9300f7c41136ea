// SPDX-License-Identifier: BSD-3-Clause
// The launchers of order and place_cursor_. They return the launch's status, without synchronising.
#pragma once

#include <cuda_runtime_api.h>

#include "../order.h"

namespace torch_renaissance {

cudaError_t order_cuda(const OrderBatch& b, cudaStream_t stream);
cudaError_t place_cursor_cuda(Cursor* to, const Cursor& place, cudaStream_t stream);

}  // namespace torch_renaissance
