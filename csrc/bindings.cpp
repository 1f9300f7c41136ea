// SPDX-License-Identifier: BSD-3-Clause
// Every op's schema, once, and what a build is.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/library.h>

#include "global_state.h"
#include "graph_nodes.h"
#include "host_step.h"
#include "ops.h"
#include "results.h"
#include "storage.h"
#include "values.h"

namespace torch_renaissance {

void bind_autograd(py::module_& m);  // autograd.cpp
void bind_watch(py::module_& m);     // watch.cpp

// By its type alone: isinstance() asks the object, which may run anything.
const c10::TensorImpl* tensor_in(PyObject* o) {
  if (!PyObject_TypeCheck(o, reinterpret_cast<PyTypeObject*>(THPVariableClass))) return nullptr;
  return unpack(o).unsafeGetTensorImpl();
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

PYBIND11_MODULE(_C, m) {
  using namespace torch_renaissance;
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
  m.attr("MAX_SEGMENTS") = kMaxSegments;
  m.attr("MAX_SLOTS") = kMaxSlots;
  m.attr("HYPER_COLUMNS") = int{kHyperColumns};
  m.attr("COUNTERS") = int{kCounters};
  m.attr("SKIPPED") = int{kSkipped};
  m.def("slice_of", slice_of);
  m.def("storage_holders", storage_holders);
  m.def("is_dense", [](const py::object& tensor) {
    return unpack(tensor.ptr()).is_non_overlapping_and_dense();
  });
  m.def("chunk_table", chunk_table);
  m.def("copy_inputs", copy_inputs);
  m.def("has_hooks", [](const py::object& tensor) { return has_hooks(tensor.ptr()); });
  py::class_<Results>(m, "Results").def(py::init<const py::list&>()).def("take", &Results::take);
#ifdef TR_WITH_CUDA
  m.def("graph_nodes", graph_nodes);
#endif
  m.attr("CONTROL_RESULTS") = int{kChainResults};
  m.attr("GRAD_NORM") = int{kGradNorm};
  m.attr("AVERAGED") = int{kAveraged};
  m.attr("NORM_PARTIALS") = 2 * kNormPartials;
  py::class_<HostStep>(m, "HostStep")
      .def(py::init<const std::string&>())
      .def("set_plan", &HostStep::set_plan)
      .def("run",
           &HostStep::run,
           py::arg("own"),
           py::arg("source") = int{HostStep::kGather},
           py::arg("amp") = py::none(),
           py::arg("micro_batches") = 1,
           py::arg("prepared") = false)
      .def("pack", &HostStep::pack)
      .def("begin_accumulation", &HostStep::begin_accumulation)
      .def("accumulate", &HostStep::accumulate, py::arg("own"), py::arg("prepared") = false)
      .def("taking_part", &HostStep::taking_part)
      .def("add_accumulated", &HostStep::add_accumulated)
      .def("ready", &HostStep::ready)
      .def("replayed", &HostStep::replayed)
      .def("refresh_low", &HostStep::refresh_low)
      .def("fits", &HostStep::fits)
      .def("chain", &HostStep::chain)
      .def_property_readonly("generation", &HostStep::generation)
      .def_property("ema_calls", &HostStep::ema_calls, &HostStep::set_ema_calls)
      .def("launched", &HostStep::launched)
      .def("unsupported", &HostStep::unsupported);
  bind_autograd(m);
  bind_watch(m);
  py::class_<GlobalState>(m, "GlobalState")
      .def(py::init<>())
      .def("fits", &GlobalState::fits)
      .def("difference", &GlobalState::difference);
  m.attr("DONE") = int{HostStep::kDone};
  m.attr("OUTDATED") = int{HostStep::kOutdated};
  m.attr("UNSUPPORTED") = int{HostStep::kUnsupported};
  m.attr("HAS_GRADIENTS") = int{HostStep::kHasGradients};
  m.attr("HAS_HOOKS") = int{HostStep::kHasHooks};
  m.attr("GATHER") = int{HostStep::kGather};
  m.attr("PACKED") = int{HostStep::kPacked};
  m.attr("ACCUMULATED") = int{HostStep::kAccumulated};
}
