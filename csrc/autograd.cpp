// SPDX-License-Identifier: BSD-3-Clause
// What autograd.h declares. Without pybind11, as the rest of its unit: its header alone takes
// longer to compile than this file.
#include "autograd.h"

#include <ATen/ops/alias.h>
#include <torch/csrc/autograd/custom_function.h>

#include <type_traits>

namespace torch_renaissance {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Stands a 16-bit copy in for a float32 parameter, without a kernel either way. The copy goes
// forward; its 16-bit gradient goes back to the parameter as it is. As a new tensor object: one
// that Python has seen counts as shared, and autograd would clone it into .grad.
struct Low : torch::autograd::Function<Low> {
  static Variable forward(AutogradContext*, const Variable& /*param*/, const Variable& low) {
    return low.alias();
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0].defined() ? grads[0].alias() : Variable(), Variable()};
  }
};

// The pointer's type depends on the version of torch.
template <typename Pointer>
void forget_node(void (*set)(const Variable&, Pointer), const Variable& t) {
  if constexpr (std::is_default_constructible_v<Pointer>) {
    set(t, Pointer());
  } else {
    set(t, Pointer(c10::intrusive_ptr<torch::autograd::Node>()));
  }
}

}  // namespace

at::Tensor low_weight(const at::Tensor& param, const at::Tensor& low) {
  return Low::apply(param, low);
}

void renew_accumulator(const at::Tensor& param) {
  if (!param.requires_grad() || !param.is_leaf()) return;
  const auto node = torch::autograd::impl::try_get_grad_accumulator(param);
  if (node == nullptr || !node->post_hooks().empty() || !node->pre_hooks().empty()) return;
  forget_node(torch::autograd::impl::set_grad_accumulator, param);
}

bool may_have_hooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && !(meta->hooks_.empty() && meta->post_acc_grad_hooks_ == nullptr);
}

}  // namespace torch_renaissance
