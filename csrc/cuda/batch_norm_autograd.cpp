// SPDX-License-Identifier: BSD-3-Clause
// Autocast's rule for batch norm, and for what follows it in place: see Note [What follows].
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <mutex>
#include <utility>

#include "../autocast_rules.h"
#include "../autograd_node.h"
#include "batch_norm_launches.h"
#include "channel_bias.h"

namespace torch_renaissance {
namespace {

using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

// Note [What follows]
// `relu_(norm(x))` and `relu_(norm(x) += residual)` are what most convolutional networks consist
// of. In a capture nothing has run yet, so what follows batch norm in place joins its kernel, as
// long as that is the last node of the stream, which means that nobody has read the output before.
// The residual may be the one that was normalised last (`relu_(y += norm(x))`): its kernel then
// writes the sum as well. The node of autograd stands for all that happened to its tensor: nobody
// can have seen the gradients in between, as there are no hooks, and nothing else refers to it.
// Every number is rounded where the separate operations would round it.
//
// Note [Two gradients]
// Where a residual network's block ends, the gradient of the next block's residual and that of its
// first convolution are added. If both blocks end in such a node, the former is handed over from
// node to node instead of through autograd, and added by the kernel that reads the sum.
struct NormState {
  SavedVariable input, weight, bias;
  SavedVariable result;  // if `relu`
  at::Tensor running_mean, running_var, mean, invstd;
  double eps = 0;
  bool relu = false, residual = false;

  // While something may still join: the kernel that wrote the output, what it does, and the
  // output's version.
  CapturedNode kernel;
  BatchNorm norm{};
  uint32_t version = 0;
};

struct BatchNormNode : Node {
  NormState state;

  explicit BatchNormNode(torch::autograd::edge_list&& edges) : Node(std::move(edges)) {}

  std::string name() const override { return "torch_renaissance::BatchNormBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (SavedVariable* saved : {&state.input, &state.weight, &state.bias, &state.result}) {
      saved->reset_data();
    }
  }

  variable_list apply(variable_list&& grads) override;

 private:
  variable_list differentiable(const at::Tensor& grad);
  bool hand_over(const at::Tensor& grad);
  at::Tensor handed_over();

  at::Tensor more_;     // what was handed over to this node,
  int more_task_ = -1;  // in which call of backward
};

// Makes `y` the output of a node with this state.
void set_node(const at::Tensor& y, torch::autograd::edge_list&& edges, NormState&& state) {
  const auto node = make_node<BatchNormNode>(std::move(edges));
  node->state = std::move(state);
  node->state.version = y._version();
  if (node->state.relu) node->state.result = SavedVariable(y, /*is_output=*/true);
  const uint32_t place = node->add_input_metadata(y);
  torch::autograd::impl::set_gradient_edge(y, {node, place});
}

variable_list BatchNormNode::apply(variable_list&& grads) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const NormState& s = state;
  variable_list found(s.residual ? 4 : 3);
  at::Tensor more = handed_over();
  if (!grads[0].defined()) std::swap(grads[0], more);
  if (!grads[0].defined()) return found;
  if (at::GradMode::is_enabled()) return differentiable(grads[0]);
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor x = s.input.unpack(), w = s.weight.unpack(), b = s.bias.unpack();
  const at::Tensor grad = grads[0].to(x.scalar_type()).contiguous(x.suggest_memory_format());
  const at::Tensor y = s.relu ? s.result.unpack(pointer_to(this)) : at::Tensor();
  const bool joint = s.relu && s.residual;
  const at::Tensor passed = joint ? at::empty_like(x) : grad;
  found[0] = at::empty_like(x);
  found[1] = at::empty_like(w);
  found[2] = at::empty_like(b);
  BatchNormBackward n{};
  n.mask = joint ? NormMask::kOfResult : s.relu ? NormMask::kOfOutput : NormMask::kNone;
  n.grad = grad.const_data_ptr();
  n.more_grad = more.defined() ? more.const_data_ptr() : nullptr;
  n.result = joint ? y.const_data_ptr() : nullptr;
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
  if (s.residual && !hand_over(passed)) found[3] = passed;
  return found;
}

// See Note [Two gradients]. False where autograd has to do it.
bool BatchNormNode::hand_over(const at::Tensor& grad) {
  const auto& edge = next_edge(3);
  auto* to = dynamic_cast<BatchNormNode*>(edge.function.get());
  if (to == nullptr || to == this || !to->state.relu || !to->state.residual ||
      !to->pre_hooks().empty() || !to->tensor_pre_hooks().empty() ||
      !to->retains_grad_hooks().empty() || to->stream() != stream()) {
    return false;
  }
  const auto* info = torch::autograd::get_current_graph_task_exec_info();
  if (info != nullptr && !info->empty()) {  // only some gradients were asked for
    const auto found = info->find(to);
    if (found == info->end() || !found->second.needed_ || found->second.captures_ != nullptr) {
      return false;
    }
  }
  const std::lock_guard<std::mutex> lock(to->mutex_);
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0 || (to->more_.defined() && to->more_task_ == task)) return false;
  to->more_ = grad;
  to->more_task_ = task;
  return true;
}

at::Tensor BatchNormNode::handed_over() {
  at::Tensor found = std::move(more_);
  more_ = at::Tensor();  // what another call of backward has left is nobody's
  return more_task_ == torch::autograd::get_current_graph_task_id() ? found : at::Tensor();
}

// For create_graph=True, from torch's own functions, each of which can be differentiated.
variable_list BatchNormNode::differentiable(const at::Tensor& grad) {
  const NormState& s = state;
  const at::Tensor x = s.input.unpack(), w = s.weight.unpack();
  at::Tensor passed = grad.to(x.scalar_type());
  if (s.relu) passed = at::threshold_backward(passed, s.result.unpack(pointer_to(this)), 0);
  const auto [of_x, of_weight, of_bias] = at::native_batch_norm_backward(passed,
                                                                         x,
                                                                         w,
                                                                         s.running_mean,
                                                                         s.running_var,
                                                                         s.mean,
                                                                         s.invstd,
                                                                         true,
                                                                         s.eps,
                                                                         {true, true, true});
  variable_list found{of_x, of_weight, of_bias};
  if (s.residual) found.push_back(passed);
  return found;
}

// -- Forward --------------------------------------------------------------------------------------

bool is_plain(const at::Tensor& t) {
  return t.defined() && t.is_cuda() && t.layout() == at::kStrided && !t._fw_grad(0).defined() &&
         !t.key_set().has_any(c10::python_ks);
}

bool is_float_of(const at::Tensor& t, const at::Tensor& x) {
  return is_plain(t) && t.scalar_type() == at::kFloat && t.device() == x.device() &&
         t.is_contiguous() && t.dim() == 1 && t.size(0) == x.size(1);
}

// Rows of channels, one after the other.
bool is_matrix(const at::Tensor& x) {
  const auto format = x.dim() == 4   ? at::MemoryFormat::ChannelsLast
                      : x.dim() == 5 ? at::MemoryFormat::ChannelsLast3d
                                     : at::MemoryFormat::Contiguous;
  return x.dim() != 3 && x.dim() >= 2 && x.dim() <= 5 && x.is_contiguous(format) &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

// Whatever torch would refuse is left to it too.
bool takes(const at::Tensor& x,
           const OptionalTensor& weight,
           const OptionalTensor& bias,
           const OptionalTensor& running_mean,
           const OptionalTensor& running_var,
           bool training) {
  const auto given = [](const OptionalTensor& t) { return t.has_value() && t->defined(); };
  if (!training || !is_plain(x) || x.numel() == 0 ||
      !(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16) || !is_matrix(x) ||
      x.size(1) % kNormVector != 0 || x.size(1) > kMostNormChannels || x.numel() == x.size(1) ||
      !given(weight) || !given(bias) || given(running_mean) != given(running_var)) {
    return false;
  }
  return is_float_of(*weight, x) && is_float_of(*bias, x) &&
         (!given(running_mean) || (is_float_of(*running_mean, x) && is_float_of(*running_var, x)));
}

at::Tensor normalised(const at::Tensor& x,
                      const at::Tensor& weight,
                      const at::Tensor& bias,
                      const at::Tensor& running_mean,
                      const at::Tensor& running_var,
                      double momentum,
                      double eps) {
  at::Tensor y, mean, invstd;
  BatchNorm n{};
  CapturedNode kernel;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    y = at::empty_like(x);
    mean = at::empty_like(weight);
    invstd = at::empty_like(weight);
    n.input = const_cast<void*>(x.const_data_ptr());
    n.output = y.mutable_data_ptr();
    n.weight = weight.const_data_ptr<float>();
    n.bias = bias.const_data_ptr<float>();
    n.mean = mean.mutable_data_ptr<float>();
    n.invstd = invstd.mutable_data_ptr<float>();
    if (running_mean.defined()) {
      n.running_mean = running_mean.mutable_data_ptr<float>();
      n.running_var = running_var.mutable_data_ptr<float>();
    }
    n.momentum = static_cast<float>(momentum);
    n.eps = static_cast<float>(eps);
    kernel = launch_batch_norm(n, x);
  }
  if (!torch::autograd::compute_requires_grad(x, weight, bias)) return y;
  NormState state;
  state.input = SavedVariable(x, false);
  state.weight = SavedVariable(weight, false);
  state.bias = SavedVariable(bias, false);
  state.running_mean = running_mean;
  state.running_var = running_var;
  state.mean = mean;
  state.invstd = invstd;
  state.eps = eps;
  state.kernel = kernel;
  state.norm = n;
  set_node(y, torch::autograd::collect_next_edges(x, weight, bias), std::move(state));
  return y;
}

using TorchBatchNorm = at::Tensor(const at::Tensor& input,
                                  const OptionalTensor& weight,
                                  const OptionalTensor& bias,
                                  const OptionalTensor& running_mean,
                                  const OptionalTensor& running_var,
                                  bool training,
                                  double momentum,
                                  double eps,
                                  bool cudnn_enabled);

at::Tensor batch_norm(c10::DispatchKeySet keys,
                      const at::Tensor& input,
                      const OptionalTensor& weight,
                      const OptionalTensor& bias,
                      const OptionalTensor& running_mean,
                      const OptionalTensor& running_var,
                      bool training,
                      double momentum,
                      double eps,
                      bool cudnn_enabled) {
  if (within_step(input) && takes(input, weight, bias, running_mean, running_var, training)) {
    return normalised(input,
                      *weight,
                      *bias,
                      running_mean.value_or(at::Tensor()),
                      running_var.value_or(at::Tensor()),
                      momentum,
                      eps);
  }
  static const auto op = find_op<TorchBatchNorm>("aten::batch_norm", "");
  return op.redispatch(keys & kBelowAutocast,
                       input,
                       weight,
                       bias,
                       running_mean,
                       running_var,
                       training,
                       momentum,
                       eps,
                       cudnn_enabled);
}

// -- What follows ---------------------------------------------------------------------------------

const void* written_by(const BatchNorm& n) { return n.sum != nullptr ? n.sum : n.output; }

// The node of a tensor that a captured batch norm has written last.
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

using TorchRelu = at::Tensor&(at::Tensor& self);

at::Tensor& relu_(c10::DispatchKeySet keys, at::Tensor& self) {
  BatchNormNode* node = at::GradMode::is_enabled() && within_step(self) ? node_of(self) : nullptr;
  if (node != nullptr && !node->state.relu && is_owner(self, *node) &&
      is_last_node(node->state.kernel, self.device())) {
    node->state.norm.relu = true;
    join(self, *node, torch::autograd::edge_list(node->next_edges()));
    return self;
  }
  static const auto op = find_op<TorchRelu>("aten::relu_", "");
  return op.redispatch(keys & kBelowAutocast, self);
}

using TorchAdd = at::Tensor&(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha);

at::Tensor& add_(c10::DispatchKeySet keys,
                 at::Tensor& self,
                 const at::Tensor& other,
                 const at::Scalar& alpha) {
  const bool alike = is_plain(other) && other.scalar_type() == self.scalar_type() &&
                     other.device() == self.device() && other.sizes() == self.sizes() &&
                     other.strides() == self.strides() && !other.is_alias_of(self) &&
                     reinterpret_cast<uintptr_t>(other.const_data_ptr()) % 16 == 0 &&
                     alpha.equal(1);
  BatchNormNode* node =
      alike && at::GradMode::is_enabled() && within_step(self) ? node_of(self) : nullptr;
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

void register_batch_norm(torch::Library& aten) {
  // torch has had no rules of its own so far. Those that it gets stay.
  const auto add = [&](const char* name, const char* overload, const char* schema, auto* kernel) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    if (op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA)) return;
    aten.impl(schema, kernel);
  };
  add("aten::batch_norm", "", "batch_norm", batch_norm);
  add("aten::relu_", "", "relu_", relu_);
  add("aten::add_", "Tensor", "add_.Tensor", add_);
}

}  // namespace torch_renaissance
