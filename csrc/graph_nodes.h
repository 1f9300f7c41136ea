// SPDX-License-Identifier: BSD-3-Clause
// What a captured graph consists of. Plain C++; empty where the build has no CUDA.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace torch_renaissance {

// Names of kernels, and "memcpy", "memset", "other", with how often each occurs. `graph` is a
// cudaGraph_t. Throws std::runtime_error where the driver refuses.
std::map<std::string, int64_t> graph_nodes(uint64_t graph);

// Which capture the current stream is part of, or 0: no two of a program have the same number.
uint64_t current_capture();

// What kernels of a capture have taken over from others, of which it has turned out that somebody
// else needs them, they give back; returns how many. When it has ended, and before its graph is
// instantiated.
int64_t settle_joins(uint64_t capture);

// Of a capture that has failed, nothing is kept.
void forget_joins(uint64_t capture);

}  // namespace torch_renaissance
