// SPDX-License-Identifier: BSD-3-Clause
// The samples of one batch, as the order of the epoch has them. Plain C++, for host and device.
#pragma once

#include "math/order.h"

namespace torch_renaissance {

struct OrderBatch {
  const Cursor* cursor;
  Order order;
  int64_t size;
  int64_t* out;  // [size]
};

// Raises in a sentence unless `size` samples can be drawn so.
Order checked_order(const char* op,
                    int64_t count,
                    bool shuffle,
                    int64_t rank,
                    int64_t world_size,
                    int64_t size);

void order_cpu(const OrderBatch& b);

}  // namespace torch_renaissance
