// SPDX-License-Identifier: BSD-3-Clause
// Batch norm's backward: one kernel or two, and torch's own functions where those don't do.
//
// Note [Beside autograd]
// Where a residual network's block ends, the gradient of the next block's residual and that of its
// first convolution are added. If both blocks end in such a node, the former is handed over from
// node to node instead of through autograd, and added by the kernel that reads the sum. So is the
// gradient of a ReLU after batch norm (NormReluNode), which batch norm's kernels mask themselves.
// Nobody may be there who would see on autograd's way what is missing from it.
#include "batch_norm_node.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

#include "../autocast_rules.h"
#include "../autograd_node.h"
#include "channel_bias.h"

namespace torch_renaissance {

using torch::autograd::variable_list;

void set_node(const at::Tensor& y, torch::autograd::edge_list&& edges, NormState&& state) {
  const auto node = make_node<BatchNormNode>(std::move(edges));
  node->state = std::move(state);
  node->state.version = y._version();
  if (node->state.relu) node->state.result = torch::autograd::SavedVariable(y, /*is_output=*/true);
  const uint32_t place = node->add_input_metadata(y);
  torch::autograd::impl::set_gradient_edge(y, {node, place});
}

at::MemoryFormat format_of_rows(const at::Tensor& t) {
  return t.dim() == 4   ? at::MemoryFormat::ChannelsLast
         : t.dim() == 5 ? at::MemoryFormat::ChannelsLast3d
                        : at::MemoryFormat::Contiguous;
}

namespace {

const void* written_by(const BatchNorm& n) { return n.sum != nullptr ? n.sum : n.output; }

}  // namespace

BatchNormNode* node_of(const at::Tensor& y) {
  if (!y.is_cuda()) return nullptr;
  const auto* meta = torch::autograd::impl::get_autograd_meta(y);
  if (meta == nullptr || meta->is_view_ || y._fw_grad(0).defined()) return nullptr;
  auto* node = dynamic_cast<BatchNormNode*>(meta->grad_fn_.get());
  if (node == nullptr || node->state.kernel.node == nullptr) return nullptr;
  const NormState& s = node->state;
  const bool same = y._version() == s.version && y.const_data_ptr() == written_by(s.norm);
  return same ? node : nullptr;
}

// -- Beside autograd ------------------------------------------------------------------------------

bool JointNode::may_take_from(Node& from) {
  if (this == &from || !from.post_hooks().empty() || !pre_hooks().empty() ||
      !tensor_pre_hooks().empty() || !retains_grad_hooks().empty() || stream() != from.stream()) {
    return false;
  }
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info == nullptr || info->empty()) return true;
  const auto found = info->find(this);  // only some gradients were asked for
  return found != info->end() && found->second.needed_ && found->second.captures_ == nullptr;
}

bool JointNode::hand_over(Node& from, const torch::autograd::Edge& edge, Handed handed) {
  auto* to = dynamic_cast<JointNode*>(edge.function.get());
  if (to == nullptr || edge.input_nr != 0 || !to->may_take_from(from)) return false;
  if (handed.more.defined() && !to->adds(handed)) return false;
  const int task = torch::autograd::get_current_graph_task_id();
  const std::lock_guard<std::mutex> lock(to->mutex_);
  // What is there may be that of a call of backward which this one is a part of.
  const bool taken = to->handed_.grad.defined() || to->handed_.more.defined();
  if (task < 0 || taken) return false;
  to->handed_ = std::move(handed);
  to->task_ = task;
  return true;
}

Handed JointNode::handed() {
  const bool own = task_ == torch::autograd::get_current_graph_task_id();
  return own ? std::exchange(handed_, {}) : Handed{};
}

// -- Batch norm -----------------------------------------------------------------------------------

void BatchNormNode::release_variables() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto* saved : {&state.input, &state.weight, &state.bias, &state.result}) {
    saved->reset_data();
  }
}

variable_list BatchNormNode::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const NormState& s = state;
  variable_list found(s.residual ? 4 : 3);
  auto [unmasked, result, more] = handed();
  if (unmasked.defined() && grads[0].defined()) {  // something else has used ReLU's input
    if (more.defined()) unmasked = at::add(unmasked, more);
    grads[0] = at::add(grads[0], at::threshold_backward(unmasked, result, 0));
    unmasked = result = more = at::Tensor();
  } else if (unmasked.defined()) {
    grads[0] = unmasked;
  }
  const bool relu = s.relu || unmasked.defined();
  if (!grads[0].defined()) std::swap(grads[0], more);
  if (!grads[0].defined()) return found;
  if (at::GradMode::is_enabled() || !is_plain(grads[0]) || transforms_active()) {
    const at::Tensor grad = more.defined() ? at::add(grads[0], more) : grads[0];
    return by_torch(unmasked.defined() ? at::threshold_backward(grad, result, 0) : grad);
  }
  // Before the guard: hooks on saved tensors, as those of checkpoints, run with autograd.
  const at::Tensor x = s.input.unpack(), w = s.weight.unpack(), b = s.bias.unpack();
  if (s.relu) result = s.result.unpack(pointer_to(this));
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor grad = grads[0].to(x.scalar_type()).contiguous(format_of_rows(x));
  const bool joint = relu && s.residual;
  const at::Tensor passed = joint ? at::empty_like(x) : grad;
  found[0] = at::empty_like(x);
  found[1] = at::empty_like(w);
  found[2] = at::empty_like(b);
  BatchNormBackward n{};
  n.mask = joint ? NormMask::kOfResult : relu ? NormMask::kOfOutput : NormMask::kNone;
  n.grad = grad.const_data_ptr();
  n.more_grad = more.defined() ? more.const_data_ptr() : nullptr;
  if (joint) result = result.contiguous(format_of_rows(x));
  n.result = joint ? result.const_data_ptr() : nullptr;
  n.grad_residual = joint ? passed.mutable_data_ptr() : nullptr;
  n.grad_input = found[0].mutable_data_ptr();
  n.grad_weight = found[1].mutable_data_ptr<float>();
  n.grad_bias = found[2].mutable_data_ptr<float>();
  n.input = x.const_data_ptr();
  n.weight = w.const_data_ptr<float>();
  n.bias = b.const_data_ptr<float>();
  n.mean = s.mean.const_data_ptr<float>();
  n.invstd = s.invstd.const_data_ptr<float>();
  at::Tensor bias_grad;
  const bool has_bias = s.norm.input_bias != nullptr;
  launch_batch_norm_backward(n, x, has_bias ? &bias_grad : nullptr);
  if (bias_grad.defined()) keep_bias_grad(found[0], bias_grad);
  if (s.residual && !hand_over(*this, next_edge(3), {{}, {}, passed})) found[3] = passed;
  return found;
}

// For create_graph=True and for batches of gradients: from torch's own functions.
variable_list BatchNormNode::by_torch(const at::Tensor& grad) {
  const NormState& s = state;
  const at::Tensor x = s.input.unpack(), w = s.weight.unpack();
  at::Tensor passed = grad.to(x.scalar_type());
  if (s.relu) passed = at::threshold_backward(passed, s.result.unpack(pointer_to(this)), 0);
  const at::Tensor no_running;  // what evaluation goes by
  const auto [of_x, of_weight, of_bias] = at::native_batch_norm_backward(
      passed, x, w, no_running, no_running, s.mean, s.invstd, true, s.eps, {true, true, true});
  variable_list found{of_x, of_weight, of_bias};
  if (s.residual) found.push_back(passed);
  return found;
}

}  // namespace torch_renaissance
