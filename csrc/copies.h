// SPDX-License-Identifier: BSD-3-Clause
// A few copies of contiguous memory on one device, made by one launch. Plain C++.
#pragma once

#include <cstdint>

namespace torch_renaissance {

inline constexpr int kMaxCopies = 16;

struct Copies {
  struct {
    void* to;
    const void* from;
    int64_t bytes;
  } item[kMaxCopies];
  int n = 0;
};

}  // namespace torch_renaissance
