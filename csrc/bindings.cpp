// SPDX-License-Identifier: BSD-3-Clause
// Every op's schema, once. The device files register their kernels; no header lies between.
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include "host.h"

namespace torch_renaissance {

// Lists over tensors: params, grads, slots (their numbers within the launch) and rows (of hyper).
// Lists over segments: state planes (empty where not needed), steps and chunks.
// counters is {ticket, skipped steps}; hyper is [rows, columns] as in math/hyper.h. grads are
// written (unscaled) only where grad_scale is given.
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

}  // namespace torch_renaissance

PYBIND11_MODULE(_C, m) {
  m.def("build_info", [] {
    pybind11::dict info;
    info["torch"] = TR_TORCH_VERSION;
#ifdef TR_WITH_CUDA
    info["cuda"] = TR_CUDA_VERSION;
#else
    info["cuda"] = pybind11::none();
#endif
    info["compiler"] = "g++ " __VERSION__;
    return info;
  });
  torch_renaissance::bind_host(m);
}
