// SPDX-License-Identifier: BSD-3-Clause
// Autocast's rule for batch norm: which calls are ours.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/library.h>

#include <utility>

#include "../autocast_rules.h"
#include "batch_norm_node.h"

namespace torch_renaissance {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
using torch::autograd::SavedVariable;

bool is_float_of(const at::Tensor& t, const at::Tensor& x) {
  return is_plain(t) && t.scalar_type() == at::kFloat && t.device() == x.device() &&
         t.is_contiguous() && t.dim() == 1 && t.size(0) == x.size(1);
}

// Rows of channels, one after the other.
bool is_matrix(const at::Tensor& x) {
  return x.dim() != 3 && x.dim() >= 2 && x.dim() <= 5 && x.is_contiguous(format_of_rows(x)) &&
         is_aligned(x);
}

}  // namespace

// Whatever torch would refuse is left to it too.
bool takes_norm(const at::Tensor& x,
                const OptionalTensor& weight,
                const OptionalTensor& bias,
                const OptionalTensor& running_mean,
                const OptionalTensor& running_var,
                bool training) {
  const auto given = [](const OptionalTensor& t) { return t.has_value() && t->defined(); };
  if (!training || !is_plain(x) || x.numel() == 0 ||
      !(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16) || !is_matrix(x) ||
      x.size(1) % kNormVector != 0 || x.size(1) > kMostNormChannels || x.numel() == x.size(1) ||
      x.numel() / x.size(1) > kMostNormRows || !given(weight) || !given(bias) ||
      given(running_mean) != given(running_var)) {
    return false;
  }
  return is_float_of(*weight, x) && is_float_of(*bias, x) &&
         (!given(running_mean) || (is_float_of(*running_mean, x) && is_float_of(*running_var, x)));
}

namespace {

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
  if (within_step(input) && takes_norm(input, weight, bias, running_mean, running_var, training)) {
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

}  // namespace

void register_batch_norm(torch::Library& aten) { add_rule(aten, "batch_norm", "", batch_norm); }

}  // namespace torch_renaissance
