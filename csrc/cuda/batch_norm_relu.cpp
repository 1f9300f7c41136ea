// SPDX-License-Identifier: BSD-3-Clause
// A ReLU after batch norm with a result of its own, in a capture: forward is torch's kernel, since
// somebody may read its input; backward is batch norm's, see Note [Beside autograd].
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/functions/utils.h>

#include "../autocast_rules.h"
#include "../autograd_node.h"
#include "batch_norm_node.h"

namespace torch_renaissance {
namespace {

class NormReluNode : public JointNode {
 public:
  explicit NormReluNode(torch::autograd::edge_list&& edges) : JointNode(std::move(edges)) {}

  void save(const at::Tensor& result) {
    result_ = torch::autograd::SavedVariable(result, /*is_output=*/true);
  }

  std::string name() const override { return "torch_renaissance::ReluBackward"; }
  // Whether batch norm's kernel can, to which all is handed on.
  bool adds(const Handed&) const override {
    const auto* norm = dynamic_cast<const BatchNormNode*>(next_edge(0).function.get());
    return norm != nullptr && norm->state.residual;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    result_.reset_data();
  }

  variable_list apply(variable_list&& grads) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    at::Tensor more = handed().more;
    at::Tensor grad = grads[0];
    if (!grad.defined()) std::swap(grad, more);
    if (!grad.defined()) return {at::Tensor()};
    const at::Tensor result = result_.unpack(pointer_to(this));
    const bool plain = !at::GradMode::is_enabled() && is_plain(grad) && !transforms_active();
    if (plain && hand_over(*this, next_edge(0), {grad, result, more})) return {at::Tensor()};
    return {at::threshold_backward(more.defined() ? at::add(grad, more) : grad, result, 0)};
  }

 private:
  torch::autograd::SavedVariable result_;
};

using TorchRelu = at::Tensor(const at::Tensor& self);

at::Tensor relu(c10::DispatchKeySet keys, const at::Tensor& self) {
  const auto* norm = at::GradMode::is_enabled() && within_step(self) ? node_of(self) : nullptr;
  if (norm == nullptr || norm->state.relu) {
    static const auto op = find_op<TorchRelu>("aten::relu", "");
    return op.redispatch(keys & kBelowAutocast, self);
  }
  at::Tensor result;
  {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::AutoDispatchBelowADInplaceOrView guard;
    result = at::relu(self);
  }
  const auto node = make_node<NormReluNode>(torch::autograd::collect_next_edges(self));
  torch::autograd::set_history(result, node);
  node->save(result);
  return result;
}

}  // namespace

void register_relu(torch::Library& aten) { add_rule(aten, "relu", "", relu); }

}  // namespace torch_renaissance
