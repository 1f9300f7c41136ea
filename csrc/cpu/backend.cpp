// SPDX-License-Identifier: BSD-3-Clause
// The CPU backend.
#include "../backend.h"

#include <algorithm>
#include <cstring>

#include "kernels.h"

namespace torch_renaissance {
namespace {

const bool cpu_registered = [] {
  cpu_backend.update = [](const Update& u, const at::Tensor&) { update_cpu(u); };
  cpu_backend.norm = [](const Norm& n, const at::Tensor&) { norm_cpu(n); };
  cpu_backend.slot_norms = [](const Norm& n, const at::Tensor&) { lars_norms_cpu(n); };
  cpu_backend.pack = [](const Pack& p, const at::Tensor&) { pack_cpu(p); };
  cpu_backend.write = [](double* to, at::ArrayRef<double> values, const at::Tensor&) {
    std::copy(values.begin(), values.end(), to);
  };
  cpu_backend.is_capturing = [] { return false; };
  return true;
}();

}  // namespace
}  // namespace torch_renaissance
