// SPDX-License-Identifier: BSD-3-Clause
// The CUDA backend of the cross entropy: scratch memory and a ticket, then a launch on the current
// stream of the tensors' device.
#include "cross_entropy.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

namespace torch_renaissance {
namespace {

bool capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

void forward(const CrossEntropy& c, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  CrossEntropyScratch scratch{};
  at::Tensor partial_sums, ticket;
  const int64_t blocks = cross_entropy_blocks(c);
  if (blocks > 1 && c.reduction != Reduction::kNone) {
    partial_sums = at::empty({blocks, 2}, like.options().dtype(at::kDouble));
    scratch.partial_sums = partial_sums.data_ptr<double>();
    scratch.ticket_number = take_tickets(stream, 1);
    if (scratch.ticket_number == kTickets) {  // none left: one more node in the graph
      ticket = at::zeros({1}, like.options().dtype(at::kInt));
      scratch.ticket = ticket.data_ptr<int32_t>();
    }
  }
  C10_CUDA_CHECK(cross_entropy_forward_cuda(c, scratch, stream));
}

void backward(const CrossEntropy& c, const at::Tensor& like) {
  const c10::cuda::CUDAGuard guard(like.device());
  C10_CUDA_CHECK(cross_entropy_backward_cuda(c, c10::cuda::getCurrentCUDAStream()));
}

const bool cuda_cross_entropy_registered = [] {
  cuda_cross_entropy = {forward, backward, [] { return !capturing(); }};
  return true;
}();

}  // namespace
}  // namespace torch_renaissance
