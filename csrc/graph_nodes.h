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

}  // namespace torch_renaissance
