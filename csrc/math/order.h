// SPDX-License-Identifier: BSD-3-Clause
// The order in which an epoch visits its samples, as a function of seed, epoch and position: no
// list of indices is kept, any position can be asked for, and every device has the same answer.
#pragma once

#include "philox.h"

namespace torch_renaissance {

// Where a run stands; lies in device memory, so that a captured graph advances it.
struct Cursor {
  int64_t seed, epoch;
  int64_t position;  // samples of this epoch that this rank has drawn
  int64_t done;      // blocks of the running kernel that are finished
};

struct Order {
  int64_t count;  // samples of an epoch
  int32_t rank, world_size;
  bool shuffle;
};

constexpr uint64_t kOrderStream = 0x6f72646572;  // "order": apart from the streams of transforms

// A permutation of {0, ..., count - 1}: a balanced Feistel network (Luby and Rackoff, 1988) over
// the next even number of bits, followed until it lands inside (cycle walking: Black and Rogaway,
// "Ciphers with arbitrary finite domains", CT-RSA 2002). The domain is below 4 * count.
struct Permutation {
  uint32_t keys[8];
  int32_t half;  // bits of either half
  uint64_t count;

  TR_HOST_DEVICE Permutation(uint64_t seed, uint64_t epoch, uint64_t n) : half(1), count(n) {
    for (int i = 0; i < 2; ++i) {
      const PhiloxBlock block = philox(seed, kOrderStream + (epoch << 40), i);
      for (int j = 0; j < 4; ++j) keys[4 * i + j] = block.word[j];
    }
    while (half < 31 && (uint64_t{1} << (2 * half)) < n) ++half;
  }

  TR_HOST_DEVICE uint64_t once(uint64_t x) const {
    const uint32_t mask = (uint32_t{1} << half) - 1;
    uint32_t left = static_cast<uint32_t>(x >> half) & mask,
             right = static_cast<uint32_t>(x) & mask;
    for (int i = 0; i < 8; ++i) {
      uint32_t mixed = (right ^ keys[i]) * 0x9E3779B1u;
      mixed = (mixed ^ mixed >> 15) * 0x85EBCA77u;
      mixed = (mixed ^ mixed >> 13) * 0xC2B2AE3Du;
      const uint32_t next = left ^ ((mixed ^ mixed >> 16) & mask);
      left = right;
      right = next;
    }
    return static_cast<uint64_t>(left) << half | right;
  }

  TR_HOST_DEVICE uint64_t operator()(uint64_t x) const {
    do x = once(x);
    while (x >= count);
    return x;
  }
};

// The i-th sample of a batch of `size` that begins at the cursor. A batch of every rank together is
// one run of the common order; past its end it begins again, so that all ranks have as many.
TR_HOST_DEVICE int64_t sample_at(const Order& order,
                                 const Cursor& cursor,
                                 int64_t size,
                                 int64_t i) {
  // Unsigned, so that whatever the cursor holds, the place is one of the order's.
  const uint64_t along = static_cast<uint64_t>(cursor.position) * order.world_size +
                         static_cast<uint64_t>(order.rank) * size + i;
  const auto count = static_cast<uint64_t>(order.count);
  const uint64_t at = along < count ? along : along % count;  // a division is slow
  if (!order.shuffle) return static_cast<int64_t>(at);
  return static_cast<int64_t>(Permutation(cursor.seed, cursor.epoch, count)(at));
}

}  // namespace torch_renaissance
