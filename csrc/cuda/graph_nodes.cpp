// SPDX-License-Identifier: BSD-3-Clause
// Walks a captured graph through the driver, which knows the names of Triton's kernels too.
#include "../graph_nodes.h"

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <vector>

namespace torch_renaissance {
namespace {

// Through the runtime, so that the extension needn't be linked with the driver.
template <typename F>
F entry_point(const char* symbol) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(symbol, &found, CUDA_VERSION, cudaEnableDefault, &result);
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string("this driver has no ") + symbol);
  }
  return reinterpret_cast<F>(found);
}

void check(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error(std::string(what) + " failed: CUDA error " + std::to_string(result));
  }
}

std::string demangled(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> text(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  return status == 0 ? text.get() : mangled;
}

std::string kernel_name(CUgraphNode node) {
  static const auto params_of =
      entry_point<decltype(&cuGraphKernelNodeGetParams)>("cuGraphKernelNodeGetParams");
  static const auto name_of_function = entry_point<decltype(&cuFuncGetName)>("cuFuncGetName");
  static const auto name_of_kernel = entry_point<decltype(&cuKernelGetName)>("cuKernelGetName");
  CUDA_KERNEL_NODE_PARAMS params{};
  check(params_of(node, &params), "cuGraphKernelNodeGetParams");
  const char* name = nullptr;
  check(params.func != nullptr ? name_of_function(&name, params.func)
                               : name_of_kernel(&name, params.kern),
        "the name of a kernel");
  return demangled(name);
}

}  // namespace

std::map<std::string, int64_t> graph_nodes(uint64_t graph) {
  const auto nodes_of = entry_point<decltype(&cuGraphGetNodes)>("cuGraphGetNodes");
  const auto type_of = entry_point<decltype(&cuGraphNodeGetType)>("cuGraphNodeGetType");
  const auto handle = reinterpret_cast<CUgraph>(graph);
  size_t count = 0;
  check(nodes_of(handle, nullptr, &count), "cuGraphGetNodes");
  std::vector<CUgraphNode> nodes(count);
  check(nodes_of(handle, nodes.data(), &count), "cuGraphGetNodes");
  std::map<std::string, int64_t> found;
  for (CUgraphNode node : nodes) {
    CUgraphNodeType type;
    check(type_of(node, &type), "cuGraphNodeGetType");
    switch (type) {
      case CU_GRAPH_NODE_TYPE_KERNEL:
        ++found[kernel_name(node)];
        break;
      case CU_GRAPH_NODE_TYPE_MEMCPY:
        ++found["memcpy"];
        break;
      case CU_GRAPH_NODE_TYPE_MEMSET:
        ++found["memset"];
        break;
      default:
        ++found["other"];
    }
  }
  return found;
}

}  // namespace torch_renaissance
