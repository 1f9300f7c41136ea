// SPDX-License-Identifier: BSD-3-Clause
// Registers the ops for the CPU.
#include "../ops.h"

#include <algorithm>

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

// On meta tensors, as torch.compile and opcheck use them, there is nothing to update.
struct Meta {
  static void update(const Update&, const at::Tensor&) {}
  static void pack(const Pack&, const at::Tensor&) {}
  static void write(double*, at::ArrayRef<double>, const at::Tensor&) {}
};

}  // namespace

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) { Ops<Cpu>::register_all(m); }
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) { Ops<Meta>::register_all(m); }

}  // namespace torch_renaissance
