// SPDX-License-Identifier: BSD-3-Clause
// The cross entropy's forward and backward: checked tensors in, work for the backend of their
// device out. What is left to torch and autograd are in cross_entropy_autograd.cpp.
#include "cross_entropy.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <atomic>
#include <limits>

#include "checks.h"
#include "logits.h"
#include "math/cross_entropy.h"

namespace torch_renaissance {
namespace {

// -- What a device is told
// -------------------------------------------------------------------------

// None if the positions' dimensions can't be seen as one.
std::optional<LogitStrides> strides_of(const at::Tensor& x) {
  if (x.dim() == 1) return LogitStrides{0, 0, x.stride(0)};
  LogitStrides strides{x.stride(0), 0, x.stride(1)};
  int64_t positions = 1;
  for (int64_t d = x.dim() - 1; d >= 2; --d) {
    if (x.size(d) == 1) continue;
    if (positions == 1) strides.position = x.stride(d);
    if (x.stride(d) != strides.position * positions) return std::nullopt;
    positions *= x.size(d);
  }
  return strides;
}

const CrossEntropyBackend& cross_entropy_of(const at::Tensor& t) {
  return t.is_cuda() ? cuda_cross_entropy : cpu_cross_entropy;
}

void check(const char* op,
           const at::Tensor& input,
           const at::Tensor& target,
           const OptionalTensor& weight,
           int64_t reduction,
           double label_smoothing) {
  scalar_type(op, input);
  TORCH_CHECK(input.dim() >= 1, op, ": input must have a dimension of classes, got a scalar");
  auto rows = input.sizes().vec();
  rows.erase(rows.begin() + class_dim(input));
  TORCH_CHECK(target.sizes() == at::IntArrayRef(rows),
              op,
              ": target has shape ",
              target.sizes(),
              ", expected ",
              at::IntArrayRef(rows),
              " for input of shape ",
              input.sizes());
  TORCH_CHECK(target.scalar_type() == at::kLong && target.device() == input.device(),
              op,
              ": target is ",
              target.scalar_type(),
              " on ",
              target.device(),
              ", expected Long on ",
              input.device());
  const int64_t n_classes = input.size(class_dim(input));
  TORCH_CHECK(n_classes <= std::numeric_limits<int32_t>::max() / 2,
              op,
              ": input has ",
              n_classes,
              " classes, more than 2^30");
  TORCH_CHECK(!weight.has_value() ||
                  (weight->scalar_type() == arithmetic_dtype(input) && weight->dim() == 1 &&
                   weight->size(0) == n_classes && weight->device() == input.device()),
              op,
              ": weight must be ",
              arithmetic_dtype(input),
              " of shape [",
              n_classes,
              "] on ",
              input.device(),
              ", got ",
              weight.has_value() ? weight->scalar_type() : at::kFloat,
              " of shape ",
              weight.has_value() ? weight->sizes() : at::IntArrayRef(),
              " on ",
              weight.has_value() ? weight->device() : input.device());
  TORCH_CHECK(reduction >= 0 && reduction <= 2,
              op,
              ": reduction must be 0 (none), 1 (mean) or 2 (sum), got ",
              reduction);
  TORCH_CHECK(label_smoothing >= 0 && label_smoothing <= 1,
              op,
              ": label_smoothing must be from 0 to 1, got ",
              label_smoothing);
}

// Tensors that `c` points into and that somebody must hold until the launch.
struct Held {
  at::Tensor input, target;
  OptionalTensor weight;
};

CrossEntropy describe_cross_entropy(const char* op,
                                    Held& held,
                                    int64_t reduction,
                                    int64_t ignore_index,
                                    double label_smoothing) {
  auto& [input, target, weight] = held;
  check(op, input, target, weight, reduction, label_smoothing);
  if (!strides_of(input)) input = input.contiguous();
  target = target.contiguous();
  if (weight.has_value()) weight = weight->contiguous();
  CrossEntropy c{};
  c.dtype = scalar_type(op, input);
  c.reduction = static_cast<Reduction>(reduction);
  c.n_rows = target.numel();
  c.n_classes = input.size(class_dim(input));
  c.n_positions = 1;
  for (int64_t d = 2; d < input.dim(); ++d) c.n_positions *= input.size(d);
  c.input = input.const_data_ptr();
  c.input_strides = *strides_of(input);
  c.target = target.const_data_ptr<int64_t>();
  c.weight = weight.has_value() ? weight->const_data_ptr() : nullptr;
  c.ignore_index = ignore_index;
  c.target_share = 1 - label_smoothing;
  c.uniform_share = c.n_classes > 0 ? label_smoothing / static_cast<double>(c.n_classes) : 0;
  return c;
}

// -- Labels
// ----------------------------------------------------------------------------------------

// Off, a bad label on a GPU makes the loss NaN, and the host waits for nothing.
std::atomic<bool> debug{false};

bool set_debug(bool on) { return debug.exchange(on); }

// On a CPU as torch does it. On a GPU in debug mode only, since it waits for the device.
void check_labels(const CrossEntropy& c, const at::Tensor& target) {
  const bool on_cpu = target.is_cpu();
  if (!on_cpu && !(debug && cross_entropy_of(target).can_wait())) return;
  const at::Tensor here = on_cpu ? target : target.cpu();
  const auto labels = here.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < c.n_rows; ++row) {
    if (classify(labels[row], c.ignore_index, c.n_classes) != Label::kOutOfBounds) continue;
    TORCH_CHECK_INDEX(false,
                      "cross_entropy: target ",
                      labels[row],
                      " in row ",
                      row,
                      " is out of bounds: there are ",
                      c.n_classes,
                      " classes, counted from 0, and ignore_index is ",
                      c.ignore_index);
  }
}

// -- Ops
// -------------------------------------------------------------------------------------------

ForwardResult forward(const at::Tensor& input,
                      const at::Tensor& target,
                      const OptionalTensor& weight,
                      int64_t reduction,
                      int64_t ignore_index,
                      double label_smoothing,
                      at::ScalarType loss_dtype) {
  const char* op = "cross_entropy_forward";
  Held held{input, target, weight};
  CrossEntropy c = describe_cross_entropy(op, held, reduction, ignore_index, label_smoothing);
  const at::ScalarType T = arithmetic_dtype(input);
  TORCH_CHECK(loss_dtype == T || loss_dtype == input.scalar_type(),
              op,
              ": loss_dtype must be ",
              T,
              " or that of input, ",
              input.scalar_type(),
              ", got ",
              loss_dtype);
  check_labels(c, held.target);
  const bool none = c.reduction == Reduction::kNone;
  at::Tensor loss =
      at::empty(none ? target.sizes() : at::IntArrayRef(), input.options().dtype(loss_dtype));
  at::Tensor saved = at::empty({c.n_rows + 1, 2}, input.options().dtype(T));
  c.wide_loss = loss_dtype == T;
  c.asserts_labels = AssertLabels::count != 0;
  c.loss = loss.data_ptr();
  c.saved = saved.data_ptr();
  cross_entropy_of(input).forward(c, input);
  return {loss, saved};
}

at::Tensor backward(const at::Tensor& grad_loss,
                    const at::Tensor& input,
                    const at::Tensor& target,
                    const OptionalTensor& weight,
                    const at::Tensor& saved,
                    int64_t reduction,
                    int64_t ignore_index,
                    double label_smoothing) {
  const char* op = "cross_entropy_backward";
  Held held{input, target, weight};
  CrossEntropy c = describe_cross_entropy(op, held, reduction, ignore_index, label_smoothing);
  const at::ScalarType T = arithmetic_dtype(input);
  const bool none = c.reduction == Reduction::kNone;
  TORCH_CHECK((grad_loss.scalar_type() == T || grad_loss.scalar_type() == input.scalar_type()) &&
                  grad_loss.device() == input.device() &&
                  grad_loss.sizes() == (none ? target.sizes() : at::IntArrayRef()),
              op,
              ": grad_loss is ",
              grad_loss.scalar_type(),
              " of shape ",
              grad_loss.sizes(),
              " on ",
              grad_loss.device(),
              ", expected ",
              T,
              " or ",
              input.scalar_type(),
              " of shape ",
              none ? target.sizes() : at::IntArrayRef(),
              " on ",
              input.device());
  TORCH_CHECK(saved.scalar_type() == T && saved.device() == input.device() &&
                  saved.sizes() == at::IntArrayRef({c.n_rows + 1, 2}) && saved.is_contiguous(),
              op,
              ": saved must be what forward returned, contiguous ",
              T,
              " of shape [",
              c.n_rows + 1,
              ", 2] on ",
              input.device(),
              ", got ",
              saved.scalar_type(),
              " of shape ",
              saved.sizes(),
              " on ",
              saved.device());
  at::Tensor grad = at::empty_like(input);
  const bool in_place = strides_of(grad).has_value();
  const at::Tensor written = in_place ? grad : at::empty_like(grad, at::MemoryFormat::Contiguous);
  // sum() hands one gradient to all rows, as a tensor whose strides are zero.
  bool same = true;
  for (int64_t d = 0; d < grad_loss.dim(); ++d) same = same && grad_loss.stride(d) == 0;
  const at::Tensor scale = same ? grad_loss : grad_loss.contiguous();
  c.wide_loss = scale.scalar_type() == T;
  c.grad_loss = scale.const_data_ptr();
  c.grad_loss_stride = same ? 0 : 1;
  c.saved = saved.data_ptr();
  c.grad = written.data_ptr();
  c.grad_strides = *strides_of(written);
  cross_entropy_of(input).backward(c, input);
  return in_place ? grad : grad.copy_(written);
}

void check_meta(const char* op, const at::Tensor& input, const at::Tensor& target) {
  TORCH_CHECK(target.device() == input.device(),
              op,
              ": target is on ",
              target.device(),
              ", expected ",
              input.device(),
              ", as input");
}

ForwardResult forward_meta(const at::Tensor& input,
                           const at::Tensor& target,
                           const OptionalTensor&,
                           int64_t reduction,
                           int64_t,
                           double,
                           at::ScalarType loss_dtype) {
  check_meta("cross_entropy_forward", input, target);
  const bool none = static_cast<Reduction>(reduction) == Reduction::kNone;
  const c10::SymIntArrayRef shape = none ? target.sym_sizes() : c10::SymIntArrayRef();
  return {at::empty_symint(shape, input.options().dtype(loss_dtype)),
          at::empty_symint({target.sym_numel() + 1, 2},
                           input.options().dtype(arithmetic_dtype(input)))};
}

at::Tensor backward_meta(const at::Tensor&,
                         const at::Tensor& input,
                         const at::Tensor& target,
                         const OptionalTensor&,
                         const at::Tensor&,
                         int64_t,
                         int64_t,
                         double) {
  check_meta("cross_entropy_backward", input, target);
  return at::empty_like(input);
}

}  // namespace

// Arguments are those of torch.nn.functional.cross_entropy, with reduction as a number. What only
// `cross_entropy` takes is left to torch. For the others weight is of the dtype of the arithmetic.
TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "int ignore_index=-100, float label_smoothing=0.0) -> Tensor");
  m.def(
      "cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int reduction, "
      "int ignore_index, float label_smoothing, ScalarType loss_dtype) "
      "-> (Tensor loss, Tensor saved)");
  m.def(
      "cross_entropy_backward(Tensor grad_loss, Tensor input, Tensor target, Tensor? weight, "
      "Tensor saved, int reduction, int ignore_index, float label_smoothing) -> Tensor");
  m.def("set_debug(bool on) -> bool", set_debug);
}

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) {
  m.impl("cross_entropy_forward", forward);
  m.impl("cross_entropy_backward", backward);
}
#ifdef TR_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) {
  m.impl("cross_entropy_forward", forward);
  m.impl("cross_entropy_backward", backward);
}
#endif
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  m.impl("cross_entropy_forward", forward_meta);
  m.impl("cross_entropy_backward", backward_meta);
}

}  // namespace torch_renaissance
