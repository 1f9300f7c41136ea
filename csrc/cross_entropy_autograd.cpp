// SPDX-License-Identifier: BSD-3-Clause
// The cross entropy's autograd, and which calls are left to torch.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <limits>

#include "autocast.h"
#include "autocast_rules.h"
#include "logits.h"

namespace torch_renaissance {
namespace {

using Forward = ForwardResult(const at::Tensor& input,
                              const at::Tensor& target,
                              const OptionalTensor& weight,
                              int64_t reduction,
                              int64_t ignore_index,
                              double label_smoothing,
                              at::ScalarType loss_dtype);
using Backward = at::Tensor(const at::Tensor& grad_loss,
                            const at::Tensor& input,
                            const at::Tensor& target,
                            const OptionalTensor& weight,
                            const at::Tensor& saved,
                            int64_t reduction,
                            int64_t ignore_index,
                            double label_smoothing);

const auto& forward_op() {
  static const auto op = find_op<Forward>("torch_renaissance::cross_entropy_forward", "");
  return op;
}
const auto& backward_op() {
  static const auto op = find_op<Backward>("torch_renaissance::cross_entropy_backward", "");
  return op;
}

// -- Autograd
// --------------------------------------------------------------------------------------

struct CrossEntropyFunction : torch::autograd::Function<CrossEntropyFunction> {
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;
  static constexpr bool is_traceable = true;  // backward reads nothing but what is saved

  // `saved` goes by address: as an output it would have to be marked as not differentiable, which
  // compiled autograd doesn't take.
  static at::Tensor forward(Context* context,
                            const at::Tensor& input,
                            const at::Tensor& target,
                            const OptionalTensor& weight,
                            int64_t reduction,
                            int64_t ignore_index,
                            double label_smoothing,
                            at::ScalarType loss_dtype,
                            at::Tensor* saved) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    at::Tensor loss;
    std::tie(loss, *saved) = forward_op().call(
        input, target, weight, reduction, ignore_index, label_smoothing, loss_dtype);
    context->save_for_backward({input, target, weight.value_or(at::Tensor()), *saved});
    context->saved_data["reduction"] = reduction;
    context->saved_data["ignore_index"] = ignore_index;
    context->saved_data["label_smoothing"] = label_smoothing;
    context->set_materialize_grads(false);
    return loss;
  }

  static Tensors backward(Context* context, Tensors grads) {
    Tensors found(8);
    if (!grads[0].defined()) return found;
    const Tensors of_forward = context->get_saved_variables();
    const OptionalTensor weight =
        of_forward[2].defined() ? OptionalTensor(of_forward[2]) : std::nullopt;
    found[0] = backward_op().call(grads[0],
                                  of_forward[0],
                                  of_forward[1],
                                  weight,
                                  of_forward[3],
                                  context->saved_data["reduction"].toInt(),
                                  context->saved_data["ignore_index"].toInt(),
                                  context->saved_data["label_smoothing"].toDouble());
    return found;
  }
};

ForwardResult forward_autograd(const at::Tensor& input,
                               const at::Tensor& target,
                               const OptionalTensor& weight,
                               int64_t reduction,
                               int64_t ignore_index,
                               double label_smoothing,
                               at::ScalarType loss_dtype) {
  if (!(at::GradMode::is_enabled() && input.requires_grad())) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return forward_op().call(
        input, target, weight, reduction, ignore_index, label_smoothing, loss_dtype);
  }
  at::Tensor saved;
  const at::Tensor loss = CrossEntropyFunction::apply(
      input, target, weight, reduction, ignore_index, label_smoothing, loss_dtype, &saved);
  return {loss, saved};
}

// With create_graph=True the gradient is that of torch's own function, which can be differentiated.
at::Tensor backward_autograd(const at::Tensor& grad_loss,
                             const at::Tensor& input,
                             const at::Tensor& target,
                             const OptionalTensor& weight,
                             const at::Tensor& saved,
                             int64_t reduction,
                             int64_t ignore_index,
                             double label_smoothing) {
  if (!(at::GradMode::is_enabled() && (input.requires_grad() || grad_loss.requires_grad()))) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return backward_op().call(
        grad_loss, input, target, weight, saved, reduction, ignore_index, label_smoothing);
  }
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  const at::ScalarType dtype = grad_loss.scalar_type();
  const at::Tensor x = input.requires_grad() ? input : input.detach().requires_grad_();
  const OptionalTensor w = weight.has_value() ? OptionalTensor(weight->to(dtype)) : weight;
  const at::Tensor loss =
      at::cross_entropy_loss(x.to(dtype), target, w, reduction, ignore_index, label_smoothing);
  return torch::autograd::grad({loss}, {x}, {grad_loss}, true, true)[0];
}

// -- What is left to torch
// -------------------------------------------------------------------------

bool has_kernels(const at::Tensor& t) {
#ifdef TR_WITH_CUDA
  return t.is_cpu() || t.is_cuda();
#else
  return t.is_cpu();
#endif
}

bool ours(const at::Tensor& t) {
  return t.layout() == at::kStrided && !t.is_nested() && !t._fw_grad(0).defined();
}

bool same_sizes(const at::Tensor& input, const at::Tensor& target) {
  const auto of_input = input.sym_sizes(), of_target = target.sym_sizes();
  const auto dim = static_cast<size_t>(class_dim(input));
  if (of_target.size() + 1 != of_input.size()) return false;
  for (size_t d = 0; d < of_target.size(); ++d) {
    if (of_target[d] != of_input[d < dim ? d : d + 1]) return false;
  }
  return true;
}

// Whatever torch would refuse is left to it too.
bool takes(const at::Tensor& input,
           const at::Tensor& target,
           const OptionalTensor& weight,
           bool autocast,
           double label_smoothing) {
  auto floating = [](at::ScalarType t) {
    return t == at::kFloat || t == at::kHalf || t == at::kBFloat16;
  };
  const at::ScalarType dtype = input.scalar_type();
  if (!ours(input) || !ours(target) || !(floating(dtype) || dtype == at::kDouble) ||
      target.scalar_type() != at::kLong || target.device() != input.device() || input.dim() == 0 ||
      !same_sizes(input, target) || input.sym_numel() == 0 ||
      input.sym_size(class_dim(input)) > std::numeric_limits<int32_t>::max() / 2 ||
      !(label_smoothing >= 0 && label_smoothing <= 1)) {
    return false;
  }
  if (!weight.has_value() || !weight->defined()) return true;
  const bool dtypes = weight->scalar_type() == dtype ||
                      (autocast && floating(dtype) && floating(weight->scalar_type()));
  return dtypes && ours(*weight) && weight->device() == input.device() && weight->dim() == 1 &&
         weight->sym_size(0) == input.sym_size(class_dim(input)) &&
         !(weight->requires_grad() && at::GradMode::is_enabled());
}

at::Tensor cross_entropy(const at::Tensor& input,
                         const at::Tensor& target,
                         const OptionalTensor& weight,
                         int64_t reduction,
                         int64_t ignore_index,
                         double label_smoothing) {
  const bool device = has_kernels(input);
  const bool autocast = device && at::autocast::is_autocast_enabled(input.device().type());
  if (!device || transforms_active() || !takes(input, target, weight, autocast, label_smoothing)) {
    return at::cross_entropy_loss(input, target, weight, reduction, ignore_index, label_smoothing);
  }
  // Under autocast torch's works in fp32, on fp32 copies; ours does anyway, without them.
  const at::ScalarType T = arithmetic_dtype(input);
  const OptionalTensor w = weight.has_value() ? OptionalTensor(weight->to(T)) : weight;
  return std::get<0>(forward_op().call(input,
                                       target,
                                       w,
                                       reduction,
                                       ignore_index,
                                       label_smoothing,
                                       autocast ? T : input.scalar_type()));
}

// -- Autocast's own
// --------------------------------------------------------------------------------

#ifdef TR_WITH_CUDA
using TorchCrossEntropy = at::Tensor(const at::Tensor& input,
                                     const at::Tensor& target,
                                     const OptionalTensor& weight,
                                     int64_t reduction,
                                     c10::SymInt ignore_index,
                                     double label_smoothing);

at::Tensor torchs_cross_entropy(c10::DispatchKeySet keys,
                                const at::Tensor& input,
                                const at::Tensor& target,
                                const OptionalTensor& weight,
                                int64_t reduction,
                                c10::SymInt ignore_index,
                                double label_smoothing) {
  const auto ignored = ignore_index.maybe_as_int();
  if (!within_step(input) || !ignored || !takes(input, target, weight, true, label_smoothing)) {
    static const auto op = find_op<TorchCrossEntropy>("aten::cross_entropy_loss", "");
    return op.redispatch(keys & kBelowAutocast,
                         input,
                         target,
                         weight,
                         reduction,
                         std::move(ignore_index),
                         label_smoothing);
  }
  const AssertLabels as_torch;
  return cross_entropy(input, target, weight, reduction, *ignored, label_smoothing);
}
#endif

}  // namespace

#ifdef TR_WITH_CUDA
void register_cross_entropy(torch::Library& aten) {
  add_rule(aten, "cross_entropy_loss", "", torchs_cross_entropy);
}
#endif

TORCH_LIBRARY_IMPL(torch_renaissance, CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", cross_entropy);
}
// Under vmap, which would else call the op row by row.
TORCH_LIBRARY_IMPL(torch_renaissance, FuncTorchBatched, m) {
  m.impl("cross_entropy", cross_entropy);
}
TORCH_LIBRARY_IMPL(torch_renaissance, Autograd, m) {
  m.impl("cross_entropy_forward", forward_autograd);
  m.impl("cross_entropy_backward", backward_autograd);
}

}  // namespace torch_renaissance
