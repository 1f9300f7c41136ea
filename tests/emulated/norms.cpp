// SPDX-License-Identifier: BSD-3-Clause
// Batch norm's rules and nodes for a CPU, so that its autograd can be tested where there is no GPU:
// the sources with other dispatch keys (see emulated_norms.py), and launches that are torch's
// operations. A "capture" runs everything at once; a kernel whose parameters change runs again.
#include "batch_norm_joins.cpp"
#include "batch_norm_node.cpp"
#include "batch_norm_relu.cpp"
#include "batch_norm_rule.cpp"

#include <ATen/ATen.h>

#include <map>

#include "../autocast_rules.cpp"

namespace torch_renaissance {
namespace {

struct Launched {
  at::Tensor sum_before;  // what BatchNorm::sum held
};

bool capturing = false;
unsigned long long capture = 0;
cudaGraphNode_t last = nullptr;
std::map<cudaGraphNode_t, Launched> launched;
int64_t joins = 0, additions = 0, masks[3] = {};

struct Plain {  // no autograd, no autocast
  c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
  at::AutoDispatchBelowADInplaceOrView no_autograd;
};

template <typename Norm>
at::Tensor matrix(const void* data, const Norm& n) {
  const auto options = at::TensorOptions().dtype(n.bfloat16 ? at::kBFloat16 : at::kHalf);
  return at::from_blob(const_cast<void*>(data), {n.rows, n.channels}, options);
}

template <typename Norm>
at::Tensor row(const float* data, const Norm& n) {
  return at::from_blob(const_cast<float*>(data), {n.channels}, at::TensorOptions(at::kFloat));
}

template <typename Norm>
void fill_sizes(Norm& n, const at::Tensor& x) {
  n.channels = static_cast<int>(x.size(1));
  n.rows = x.numel() / n.channels;
  n.bfloat16 = x.scalar_type() == at::kBFloat16;
}

template <typename Norm>
at::Tensor normalised_rows(const Norm& n) {
  const at::Tensor x = matrix(n.input, n).to(at::kFloat) - row(n.mean, n);
  const at::Tensor scale = row(n.weight, n) * row(n.invstd, n);
  return (x * scale + row(n.bias, n)).to(n.bfloat16 ? at::kBFloat16 : at::kHalf);
}

void write(const BatchNorm& n, const at::Tensor& sum_before) {
  at::Tensor y = normalised_rows(n);
  if (n.sum != nullptr) {
    matrix(n.output, n).copy_(y);
    y = y + sum_before;
  } else if (n.residual != nullptr) {
    y = y + matrix(n.residual, n);
  }
  if (n.relu) y = at::relu(y);
  matrix(n.sum != nullptr ? n.sum : n.output, n).copy_(y);
}

}  // namespace

CapturedNode launch_batch_norm(BatchNorm& n, const at::Tensor& x) {
  const Plain plain;
  fill_sizes(n, x);
  const at::Tensor rows = matrix(n.input, n).to(at::kFloat), mean = rows.mean(0);
  row(n.mean, n).copy_(mean);
  row(n.invstd, n).copy_((rows.var(0, false) + n.eps).rsqrt());
  if (n.running_mean != nullptr) {
    row(n.running_mean, n).lerp_(mean, n.momentum);
    row(n.running_var, n).lerp_(rows.var(0, true), n.momentum);
  }
  write(n, {});
  if (!capturing) return {};
  last = reinterpret_cast<cudaGraphNode_t>(reinterpret_cast<intptr_t>(last) + 1);
  launched[last] = {};
  return {last, capture};
}

void launch_batch_norm_backward(BatchNormBackward& n, const at::Tensor& x, at::Tensor*) {
  const Plain plain;
  fill_sizes(n, x);
  ++masks[static_cast<int>(n.mask)];
  at::Tensor grad = matrix(n.grad, n);
  if (n.more_grad != nullptr) {
    grad = grad + matrix(n.more_grad, n);
    ++additions;
  }
  const auto passed = [&](const at::Tensor& result) { return grad.masked_fill(result <= 0, 0); };
  if (n.mask == NormMask::kOfOutput) grad = passed(normalised_rows(n));
  if (n.mask == NormMask::kOfResult) {
    grad = passed(matrix(n.result, n));
    matrix(n.grad_residual, n).copy_(grad);
  }
  const at::Tensor g = grad.to(at::kFloat), invstd = row(n.invstd, n);
  const at::Tensor distance = matrix(n.input, n).to(at::kFloat) - row(n.mean, n);
  const at::Tensor of_bias = g.sum(0), of_weight = (g * distance).sum(0) * invstd;
  row(n.grad_bias, n).copy_(of_bias);
  row(n.grad_weight, n).copy_(of_weight);
  const at::Tensor left = g - of_bias / n.rows - distance * (of_weight * invstd / n.rows);
  matrix(n.grad_input, n).copy_(left * (row(n.weight, n) * invstd));
}

bool is_last_node(const CapturedNode& node, at::Device) {
  return node.node != nullptr && capturing && node == CapturedNode{last, capture};
}

void set_batch_norm(const BatchNorm& n, const CapturedNode& kernel) {
  const Plain plain;
  Launched& before = launched.at(kernel.node);
  if (n.sum != nullptr && !before.sum_before.defined()) {
    before.sum_before = matrix(n.sum, n).clone();
  }
  write(n, before.sum_before);
  ++joins;
}

void keep_bias_grad(const at::Tensor&, const at::Tensor&) {}
void register_cross_entropy(torch::Library&) {}
void register_max_pool(torch::Library&) {}

TORCH_LIBRARY_FRAGMENT(emulated_norms, m) {
  m.def("capturing(bool on) -> ()", [](bool on) {
    capturing = on;
    ++capture;
    launched.clear();
  });
  // Since the last call: joins, gradients added by a kernel, and kernels with each mask.
  m.def("counts() -> int[]", []() {
    const std::vector<int64_t> found{joins, additions, masks[0], masks[1], masks[2]};
    joins = additions = masks[0] = masks[1] = masks[2] = 0;
    return found;
  });
}

}  // namespace torch_renaissance
