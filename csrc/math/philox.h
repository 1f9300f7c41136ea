// SPDX-License-Identifier: BSD-3-Clause
// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): random bits
// as a function of a key and a counter. Nothing is kept between draws, so neither the order of
// draws nor the device matters. Below it, what one makes of the bits.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace torch_renaissance {

struct PhiloxBlock {
  uint32_t word[4];

  // Words 0 and 1, or 2 and 3.
  TR_HOST_DEVICE uint64_t pair(int i) const {
    return static_cast<uint64_t>(word[2 * i + 1]) << 32 | word[2 * i];
  }
};

TR_HOST_DEVICE PhiloxBlock philox4x32(PhiloxBlock counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(0xD2511F53u) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(0xCD9E8D57u) * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// 128 random bits: block `index` of a stream. Streams of one seed, and seeds, are independent.
TR_HOST_DEVICE PhiloxBlock philox(uint64_t seed, uint64_t stream, uint64_t index) {
  return philox4x32({{static_cast<uint32_t>(index),
                      static_cast<uint32_t>(index >> 32),
                      static_cast<uint32_t>(stream),
                      static_cast<uint32_t>(stream >> 32)}},
                    static_cast<uint32_t>(seed),
                    static_cast<uint32_t>(seed >> 32));
}

// In [0, 1): multiples of 2^-24, the most that float holds without rounding.
TR_HOST_DEVICE float uniform_float(uint32_t bits) {
  return static_cast<float>(bits >> 8) * 0x1p-24f;
}

// In [0, 1): multiples of 2^-53.
TR_HOST_DEVICE double uniform_double(uint64_t bits) {
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

// In (-1/2, 1/2): odd multiples of 2^-53, so never 0, and x is as likely as -x.
TR_HOST_DEVICE double uniform_centred(uint64_t bits) {
  return static_cast<double>(static_cast<int64_t>(bits >> 12) * 2 + 1 - (int64_t{1} << 52)) *
         0x1p-53;
}

// In {0, ..., n - 1}. Some values are likelier than others by at most n / 2^64.
TR_HOST_DEVICE uint32_t uniform_below(uint64_t bits, uint32_t n) {
  const uint64_t low = (bits & 0xFFFFFFFFu) * n;
  return static_cast<uint32_t>(((bits >> 32) * n + (low >> 32)) >> 32);
}

}  // namespace torch_renaissance
