// SPDX-License-Identifier: BSD-3-Clause
// The samples of one batch on the CPU.
#include "../order.h"

#include <ATen/Parallel.h>

namespace torch_renaissance {

void order_cpu(const OrderBatch& b) {
  at::parallel_for(0, b.size, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) b.out[i] = sample_at(b.order, *b.cursor, b.size, i);
  });
}

}  // namespace torch_renaissance
