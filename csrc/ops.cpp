// SPDX-License-Identifier: BSD-3-Clause
// The ops: checked tensors in, work for the backend of their device out.
#include <torch/library.h>

#include <algorithm>

#include "backend.h"
#include "checks.h"

namespace torch_renaissance {

struct Ops {
  static void sgd_(at::TensorList params,
                   at::TensorList grads,
                   at::TensorList momentum_buffers,
                   at::TensorList steps,
                   const at::Tensor& counters,
                   at::TensorList chunks,
                   at::IntArrayRef slots,
                   at::IntArrayRef rows,
                   const at::Tensor& hyper,
                   bool counts_skips,
                   const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& found_inf) {
    run("sgd_",
        Rule::kSgd,
        params,
        grads,
        {momentum_buffers},
        steps,
        counters,
        chunks,
        slots,
        rows,
        hyper,
        counts_skips,
        grad_scale,
        found_inf);
  }

  static void adam_(at::TensorList params,
                    at::TensorList grads,
                    at::TensorList exp_avgs,
                    at::TensorList exp_avg_sqs,
                    at::TensorList max_exp_avg_sqs,
                    at::TensorList steps,
                    const at::Tensor& counters,
                    at::TensorList chunks,
                    at::IntArrayRef slots,
                    at::IntArrayRef rows,
                    const at::Tensor& hyper,
                    bool counts_skips,
                    const std::optional<at::Tensor>& grad_scale,
                    const std::optional<at::Tensor>& found_inf) {
    run("adam_",
        Rule::kAdam,
        params,
        grads,
        {exp_avgs, exp_avg_sqs, max_exp_avg_sqs},
        steps,
        counters,
        chunks,
        slots,
        rows,
        hyper,
        counts_skips,
        grad_scale,
        found_inf);
  }

  static void pack_(at::TensorList params,
                    at::TensorList grads,
                    at::TensorList planes,
                    at::TensorList chunks,
                    at::IntArrayRef slots,
                    at::IntArrayRef counts) {
    if (params.empty()) return;
    Pack p{};
    std::vector<Slot> described;
    describe("pack_", p, described, params, grads, slots, {}, {planes}, chunks, counts);
    backend_of(params.front()).pack(p, params.front());
  }

  static void set_hyper_(const at::Tensor& hyper, at::ArrayRef<double> values) {
    TORCH_CHECK(hyper.scalar_type() == at::kDouble && hyper.is_contiguous() &&
                    hyper.numel() == static_cast<int64_t>(values.size()),
                "set_hyper_: got ",
                values.size(),
                " values for ",
                hyper.numel(),
                " of ",
                hyper.scalar_type(),
                "; expected a contiguous float64 tensor of as many");
    backend_of(hyper).write(hyper.data_ptr<double>(), values, hyper);
  }

  static void register_all(torch::Library& m) {
    m.impl("sgd_", sgd_);
    m.impl("adam_", adam_);
    m.impl("pack_", pack_);
    m.impl("set_hyper_", set_hyper_);
  }

 private:
  static bool empty(at::TensorList params) {
    return std::all_of(
        params.begin(), params.end(), [](const at::Tensor& p) { return !p.numel(); });
  }

  static void run(const char* op,
                  Rule rule,
                  at::TensorList params,
                  at::TensorList grads,
                  std::initializer_list<at::TensorList> planes,
                  at::TensorList steps,
                  const at::Tensor& counters,
                  at::TensorList chunks,
                  at::IntArrayRef slots,
                  at::IntArrayRef rows,
                  const at::Tensor& hyper,
                  bool counts_skips,
                  const std::optional<at::Tensor>& grad_scale,
                  const std::optional<at::Tensor>& found_inf) {
    if (params.empty()) return;
    TORCH_CHECK(rows.size() == params.size(),
                op,
                ": got ",
                rows.size(),
                " rows for ",
                params.size(),
                " params");
    Update u{};
    u.rule = rule;
    std::vector<Slot> described;
    describe(op, u, described, params, grads, slots, rows, planes, chunks, slot_counts(steps));
    for (int i = 0; i < u.n_segments; ++i) {
      TORCH_CHECK(rule == Rule::kSgd || (u.segments[i].planes[0] && u.segments[i].planes[1]) ||
                      u.segments[i].n_slots == 0 || u.segments[i].n_chunks == 0 || empty(params),
                  op,
                  ": exp_avgs[",
                  i,
                  "] and exp_avg_sqs[",
                  i,
                  "] must not be empty");
    }
    describe_update(
        op, u, params.front(), steps, counters, hyper, rows, counts_skips, grad_scale, found_inf);
    backend_of(params.front()).update(u, params.front());
  }
};

// On meta tensors, as torch.compile and opcheck use them, there is nothing to update. Real tensors
// among them would be left alone in silence.
inline void meta_op(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto check = [&](size_t i, const at::Tensor& t) {
    TORCH_CHECK(t.is_meta(),
                op.schema().name().substr(sizeof("torch_renaissance::") - 1),
                ": ",
                arguments[i].name(),
                " is on ",
                t.device(),
                " while other arguments are on meta");
  };
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i].isTensor()) check(i, values[i].toTensor());
    if (!values[i].isTensorList()) continue;
    for (const at::Tensor& t : values[i].toTensorVector()) check(i, t);
  }
  torch::jit::drop(*stack, arguments.size());
}

// Lists over tensors: params, grads, slots (their numbers within the launch) and rows (of hyper).
// Lists over segments: state planes (empty where not needed), steps and chunks.
// counters is {ticket, skipped steps, averaged steps}; hyper is [rows, columns] as in
// math/hyper.h. grads are written (unscaled) only where grad_scale is given.
TORCH_LIBRARY(torch_renaissance, m) {
  m.def(
      "sgd_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] momentum_buffers, "
      "Tensor(d!)[] steps, Tensor(e!) counters, Tensor[] chunks, int[] slots, int[] rows, "
      "Tensor hyper, bool counts_skips=True, Tensor? grad_scale=None, Tensor? found_inf=None) "
      "-> ()");
  m.def(
      "adam_(Tensor(a!)[] params, Tensor(b!)[] grads, Tensor(c!)[] exp_avgs, "
      "Tensor(d!)[] exp_avg_sqs, Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] steps, "
      "Tensor(g!) counters, Tensor[] chunks, int[] slots, int[] rows, Tensor hyper, "
      "bool counts_skips=True, Tensor? grad_scale=None, Tensor? found_inf=None) -> ()");
  m.def(
      "pack_(Tensor[] params, Tensor[] grads, Tensor(a!)[] planes, Tensor[] chunks, int[] slots, "
      "int[] counts) -> ()");
  m.def("set_hyper_(Tensor(a!) hyper, float[] values) -> ()");
}

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) { Ops::register_all(m); }
#ifdef TR_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) { Ops::register_all(m); }
#endif
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  for (const char* op : {"sgd_", "adam_", "pack_", "set_hyper_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&meta_op>());
  }
}

}  // namespace torch_renaissance
