// SPDX-License-Identifier: BSD-3-Clause
// When autocast's rules are ours, and their registration at the first step that wants them: a
// program without one keeps torch's dispatch as it is.
#include "autocast_rules.h"

#include <atomic>

namespace torch_renaissance {
namespace {

std::atomic<int64_t> steps_under_autocast{0};

#ifdef TR_WITH_CUDA
bool register_rules() {
  static torch::Library aten(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutocastCUDA, __FILE__, __LINE__);
  register_cross_entropy(aten);
  register_batch_norm(aten);
  register_joins(aten);
  register_relu(aten);
  register_max_pool(aten);
  return true;
}
#endif

}  // namespace

void count_autocast_steps(int64_t change) {
#ifdef TR_WITH_CUDA
  if (change > 0) {
    static const bool registered = register_rules();
    static_cast<void>(registered);
  }
#endif
  steps_under_autocast += change;
}

bool transforms_active() {
  const auto keys = c10::impl::tls_local_dispatch_key_set().included_;
  return keys.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         keys.has(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

bool within_step(const at::Tensor& input) {
  return steps_under_autocast != 0 && !input.key_set().has_any(c10::python_ks) &&
         !transforms_active();
}

bool is_plain(const at::Tensor& t) {
  static const c10::DispatchKeySet usual({c10::DispatchKey::CUDA,
                                          c10::DispatchKey::AutogradCUDA,
                                          c10::DispatchKey::ADInplaceOrView,
                                          c10::DispatchKey::AutocastCUDA});
  return t.defined() && usual.isSupersetOf(t.key_set()) && !t._fw_grad(0).defined();
}

bool is_aligned(const at::Tensor& t) {
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0;
}

at::Tensor aligned(const at::Tensor& t) { return is_aligned(t) ? t : t.clone(); }

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def("count_autocast_steps(int change) -> ()", count_autocast_steps);
}

}  // namespace torch_renaissance
