// SPDX-License-Identifier: BSD-3-Clause
// The CUDA backend: launchers on the current stream of the tensors' device.
#include "../backend.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "channel_bias.h"
#include "launch.h"

namespace torch_renaissance {
namespace {

struct Cuda {
  static void update(const Update& u, const at::Tensor& like) {
    check_slots(u.n_slots);
    const c10::cuda::CUDAGuard guard(like.device());
    C10_CUDA_CHECK(update_cuda(u, c10::cuda::getCurrentCUDAStream()));
  }
  static void norm(const Norm& n, const at::Tensor& like) {
    check_slots(n.n_slots);
    const c10::cuda::CUDAGuard guard(like.device());
    C10_CUDA_CHECK(norm_cuda(n, c10::cuda::getCurrentCUDAStream()));
  }
  static bool checked_update(const Norm& n, const Update& u, const at::Tensor& like) {
    const c10::cuda::CUDAGuard guard(like.device());
    bool fits = false;
    C10_CUDA_CHECK(checked_update_cuda(n, u, c10::cuda::getCurrentCUDAStream(), fits));
    return fits;
  }
  static void slot_norms(const Norm& n, const at::Tensor& like) {
    check_slots(n.n_slots);
    const c10::cuda::CUDAGuard guard(like.device());
    C10_CUDA_CHECK(lars_norms_cuda(n, c10::cuda::getCurrentCUDAStream()));
  }
  static void pack(const Pack& p, const at::Tensor& like) {
    check_slots(p.n_slots);
    const c10::cuda::CUDAGuard guard(like.device());
    C10_CUDA_CHECK(pack_cuda(p, c10::cuda::getCurrentCUDAStream()));
  }
  static void write(double* to, at::ArrayRef<double> values, const at::Tensor& like) {
    const c10::cuda::CUDAGuard guard(like.device());
    C10_CUDA_CHECK(write_values_cuda(
        to, values.data(), static_cast<int64_t>(values.size()), c10::cuda::getCurrentCUDAStream()));
  }
  static void* capture_copy(const Copies& c, const at::Tensor& like) {
    const c10::cuda::CUDAGuard guard(like.device());
    cudaGraphNode_t node;
    C10_CUDA_CHECK(capture_copy_cuda(c, c10::cuda::getCurrentCUDAStream(), &node));
    return node;
  }
  static void set_copy(uint64_t exec, void* node, const Copies& c) {
    C10_CUDA_CHECK(set_copy_cuda(
        c, reinterpret_cast<cudaGraphExec_t>(exec), static_cast<cudaGraphNode_t>(node)));
  }
  static bool is_capturing() {
    return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
  }
  static void check_slots(int64_t n_slots) {
    TORCH_CHECK(
        n_slots <= kMaxSlots, "a launch takes at most ", kMaxSlots, " tensors, got ", n_slots);
  }
};

const bool cuda_registered = [] {
  cuda_backend = {Cuda::update,
                  Cuda::norm,
                  Cuda::checked_update,
                  Cuda::slot_norms,
                  Cuda::pack,
                  Cuda::write,
                  Cuda::capture_copy,
                  Cuda::set_copy,
                  Cuda::is_capturing,
                  add_channel_bias,
                  take_bias_grad};
  return true;
}();

}  // namespace

}  // namespace torch_renaissance
