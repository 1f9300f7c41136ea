// SPDX-License-Identifier: BSD-3-Clause
#include "batch_norm_launches.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <vector>

#include "../graph_nodes.h"
#include "channel_bias.h"
#include "norm_memory.h"

namespace torch_renaissance {
namespace {

template <typename Norm>
void fill_sizes(Norm& n, const at::Tensor& x) {
  n.channels = static_cast<int>(x.size(1));
  n.rows = x.numel() / n.channels;
  n.bfloat16 = x.scalar_type() == at::kBFloat16;
}

// Note [Who adds the bias]
// In a capture, the bias of a convolution that nothing has followed yet is added by what follows
// now, which reads the output anyway; a node can't be taken out of a capture, so its own kernel is
// left with nothing to do. Another stream may have waited for that kernel meanwhile, and read the
// output beside what follows: only the finished graph tells, and then all is put back.
struct TakenBias {
  CapturedNode kernel;
  ChannelBias bias;
  cudaGraphNode_t reader;
  bool cluster;
};

std::mutex taken_mutex;
std::vector<TakenBias> taken;

void set_bias(ChannelBias bias, cudaGraphNode_t kernel, bool adds) {
  if (!adds) bias.rows = 0;
  C10_CUDA_CHECK(set_channel_bias_cuda(bias, kernel));
}

bool take_over_bias(BatchNorm& n, cudaStream_t stream) {
  const auto& [kernel, bias] = captured_bias;
  if (kernel.node == nullptr || bias.matrix != n.input || bias.rows != n.rows ||
      bias.channels != n.channels || bias.bfloat16 != n.bfloat16 ||
      !(kernel == last_node(stream))) {
    return false;
  }
  set_bias(bias, kernel.node, false);
  n.input_bias = bias.bias;
  return true;
}

// Whether exactly one node depends on this one.
bool has_one_dependent(cudaGraphNode_t node) {
  std::array<cudaGraphNode_t, 2> found;
  std::array<cudaGraphEdgeData, 2> edges;  // there may be some; see launch_norm()
  size_t count = found.size();
#if CUDART_VERSION >= 13000
  C10_CUDA_CHECK(cudaGraphNodeGetDependentNodes(node, found.data(), edges.data(), &count));
#else
  C10_CUDA_CHECK(cudaGraphNodeGetDependentNodes_v2(node, found.data(), edges.data(), &count));
#endif
  return count == 1;
}

}  // namespace

CapturedNode launch_batch_norm(BatchNorm& n, const at::Tensor& x) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  fill_sizes(n, x);
  const bool takes_bias = take_over_bias(n, stream);
  const NormTiling tiling = norm_tiling(n.rows, n.channels);
  const NormMemory scratch(tiling, x, stream);
  cudaGraphNode_t reader;
  C10_CUDA_CHECK(batch_norm_cuda(n, tiling, scratch.pointers, stream, &reader));
  if (takes_bias) {
    const std::lock_guard<std::mutex> lock(taken_mutex);
    taken.push_back({captured_bias.node, captured_bias.bias, reader, tiling.cluster});
  }
  return last_node(stream);
}

void launch_batch_norm_backward(BatchNormBackward& n, const at::Tensor& x, at::Tensor* bias_grad) {
  const c10::cuda::CUDAGuard guard(x.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  fill_sizes(n, x);
  const NormTiling tiling = norm_tiling(n.rows, n.channels);
  const NormMemory scratch(tiling, x, stream);
  if (bias_grad != nullptr && !tiling.cluster) {
    *bias_grad = at::empty({n.channels}, x.options());
    n.grad_input_bias = bias_grad->mutable_data_ptr();
  }
  C10_CUDA_CHECK(batch_norm_backward_cuda(n, tiling, scratch.pointers, stream));
}

uint64_t current_capture() { return capture_of(c10::cuda::getCurrentCUDAStream()); }

int64_t settle_joins(uint64_t capture) {
  int64_t put_back = 0;
  {
    const std::lock_guard<std::mutex> lock(taken_mutex);
    for (const TakenBias& t : taken) {
      if (t.kernel.capture != capture || has_one_dependent(t.kernel.node)) continue;
      set_bias(t.bias, t.kernel.node, true);
      C10_CUDA_CHECK(leave_bias_cuda(t.reader, t.cluster));
      ++put_back;
    }
  }
  forget_joins(capture);
  return put_back;
}

void forget_joins(uint64_t capture) {
  drop_bias_grad();  // it has memory of the graph's
  const std::lock_guard<std::mutex> lock(taken_mutex);
  const auto mine = [&](const TakenBias& t) { return t.kernel.capture == capture; };
  taken.erase(std::remove_if(taken.begin(), taken.end(), mine), taken.end());
}

bool is_last_node(const CapturedNode& node, at::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  return node.node != nullptr && node == last_node(c10::cuda::getCurrentCUDAStream());
}

void set_batch_norm(const BatchNorm& n, const CapturedNode& kernel) {
  C10_CUDA_CHECK(set_batch_norm_cuda(n, kernel.node));
}

}  // namespace torch_renaissance
