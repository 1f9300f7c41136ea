// SPDX-License-Identifier: BSD-3-Clause
// What fill_random_ does to a tensor. Plain C++, for host and device, without torch's headers.
#pragma once

#include "math/distribution.h"
#include "update.h"

namespace torch_renaissance {

// Element i of `out` (contiguous) is drawn from pair i % 2 of block i / 2 of the stream.
struct Fill {
  ScalarType dtype;
  void* out;
  int64_t count;
  uint64_t seed, stream;
  Distribution distribution;
  double a, b;
};

void fill_random_cpu(const Fill& f);

// Writes the elements of block `index`, of which the last may have only one.
template <typename scalar_t, typename Round>
TR_HOST_DEVICE void fill_block(const Fill& f, int64_t index, Round round) {
  const PhiloxBlock block = philox(f.seed, f.stream, static_cast<uint64_t>(index));
  auto out = static_cast<scalar_t*>(f.out) + 2 * index;
  out[0] = round(draw(f.distribution, f.a, f.b, block.pair(0)));
  if (2 * index + 1 < f.count) out[1] = round(draw(f.distribution, f.a, f.b, block.pair(1)));
}

}  // namespace torch_renaissance
