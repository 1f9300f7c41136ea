// SPDX-License-Identifier: BSD-3-Clause
// Autocast's rules for what follows batch norm in place.
//
// Note [What follows]
// `relu_(norm(x))` and `relu_(norm(x) += residual)` are what most convolutional networks consist
// of. In a capture nothing has run yet, so what follows batch norm in place joins its kernel, as
// long as that is the last node of the stream, which means that nobody has read the output before.
// The residual may be the one that was normalised last (`relu_(y += norm(x))`): its kernel then
// writes the sum as well. The node of autograd stands for all that happened to its tensor: nobody
// can have seen the gradients in between, as there are no hooks, and nothing else refers to it.
// Every number is rounded where the separate operations would round it.
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <utility>

#include "../autocast_rules.h"
#include "batch_norm_node.h"

namespace torch_renaissance {
namespace {

// Whether nothing but `y` refers to its node, so that another one may take its place.
bool is_owner(const at::Tensor& y, BatchNormNode& node) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(y);
  return meta->grad_fn_.use_count() == 1 && meta->hooks_.empty() && node.pre_hooks().empty() &&
         node.post_hooks().empty() && node.tensor_pre_hooks().empty() &&
         node.retains_grad_hooks().empty();
}

void join(const at::Tensor& y, BatchNormNode& node, torch::autograd::edge_list&& edges) {
  NormState state = std::move(node.state);
  set_batch_norm(state.norm, state.kernel);
  state.relu = state.norm.relu;
  torch::autograd::impl::bump_version(y);
  set_node(y, std::move(edges), std::move(state));
}

// The kernel that is to add `other` to `y`, which `node` belongs to: its own, or that of `other`.
bool find_adder(BatchNormNode& node, const at::Tensor& other, at::Device device) {
  NormState& s = node.state;
  if (is_last_node(s.kernel, device)) {
    // The kernel may read a residual before it adds a convolution's bias to the input.
    if (s.norm.input_bias != nullptr && other.const_data_ptr() == s.norm.input) return false;
    s.norm.residual = other.const_data_ptr();
    return true;
  }
  BatchNormNode* last = node_of(other);
  if (last == nullptr || last->state.relu || last->state.residual ||
      last->state.kernel.capture != s.kernel.capture || !is_last_node(last->state.kernel, device)) {
    return false;
  }
  void* sum = s.norm.output;
  s.kernel = std::exchange(last->state.kernel, {});  // nothing joins it on behalf of `other`
  s.norm = last->state.norm;
  s.norm.sum = sum;
  s.norm.residual = sum;
  return true;
}

using TorchReluInPlace = at::Tensor&(at::Tensor& self);

at::Tensor& relu_(c10::DispatchKeySet keys, at::Tensor& self) {
  BatchNormNode* node = at::GradMode::is_enabled() && within_step(self) ? node_of(self) : nullptr;
  if (node != nullptr && !node->state.relu && is_owner(self, *node) &&
      is_last_node(node->state.kernel, self.device())) {
    node->state.norm.relu = true;
    join(self, *node, torch::autograd::edge_list(node->next_edges()));
    return self;
  }
  static const auto op = find_op<TorchReluInPlace>("aten::relu_", "");
  return op.redispatch(keys & kBelowAutocast, self);
}

// Whether a kernel may go through both element by element.
bool is_alike(const at::Tensor& other, const at::Tensor& self) {
  return is_plain(other) && other.scalar_type() == self.scalar_type() &&
         other.device() == self.device() && other.sizes() == self.sizes() &&
         other.strides() == self.strides() && !other.is_alias_of(self) && is_aligned(other);
}

using TorchAdd = at::Tensor&(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha);

at::Tensor& add_(c10::DispatchKeySet keys,
                 at::Tensor& self,
                 const at::Tensor& other,
                 const at::Scalar& alpha) {
  const bool in_step = at::GradMode::is_enabled() && within_step(self);
  BatchNormNode* node =
      in_step && is_alike(other, self) && alpha.equal(1) ? node_of(self) : nullptr;
  if (node != nullptr && !node->state.relu && !node->state.residual && is_owner(self, *node) &&
      find_adder(*node, other, self.device())) {
    node->state.residual = true;
    torch::autograd::edge_list edges(node->next_edges());
    edges.push_back(torch::autograd::impl::gradient_edge(other));
    join(self, *node, std::move(edges));
    return self;
  }
  static const auto op = find_op<TorchAdd>("aten::add_", "Tensor");
  return op.redispatch(keys & kBelowAutocast, self, other, alpha);
}

}  // namespace

void register_joins(torch::Library& aten) {
  add_rule(aten, "relu_", "", relu_);
  add_rule(aten, "add_", "Tensor", add_);
}

}  // namespace torch_renaissance
