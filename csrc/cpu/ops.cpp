// SPDX-License-Identifier: BSD-3-Clause
// Registers the ops for the CPU.
#include "../ops.h"

#include <algorithm>

#include "../backend.h"
#include "update.h"

namespace torch_renaissance {
namespace {

struct Cpu {
  static void update(const Update& u, const at::Tensor&) { update_cpu(u); }
  static void pack(const Pack& p, const at::Tensor&) { pack_cpu(p); }
  static void write(double* to, at::ArrayRef<double> values, const at::Tensor&) {
    std::copy(values.begin(), values.end(), to);
  }
};

const bool registered = [] {
  cpu_backend = {Cpu::update, Cpu::pack, Cpu::write, [] { return false; }};
  return true;
}();

// On meta tensors, as torch.compile and opcheck use them, there is nothing to update. Real tensors
// among them would be left alone in silence.
void meta(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
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

}  // namespace

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) { Ops<Cpu>::register_all(m); }
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) {
  for (const char* op : {"sgd_", "adam_", "pack_", "set_hyper_"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&meta>());
  }
}

}  // namespace torch_renaissance
