// SPDX-License-Identifier: BSD-3-Clause
// What Python sees of the extension besides its ops, and what a build is.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "global_state.h"
#include "graph_copies.h"
#include "graph_nodes.h"
#include "host_step.h"
#include "storage.h"

namespace torch_renaissance {

void bind_watch(py::module_& m);  // watch.cpp

}  // namespace torch_renaissance

PYBIND11_MODULE(_C, m) {
  using namespace torch_renaissance;
  find_tensor_offset();
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
  m.def("has_hooks", [](const py::object& tensor) { return has_hooks(tensor.ptr()); });
  py::class_<GraphCopies>(m, "GraphCopies")
      .def(py::init<const py::tuple&>())
      .def("add_results", &GraphCopies::add_results)
      .def("prepare", &GraphCopies::prepare);
  m.def("add_channel_bias", [](const py::object& output, const py::object& bias) {
    const at::Tensor& y = unpack(output.ptr());
    const auto add = backend_of(y).add_channel_bias;
    return add != nullptr && add(y, unpack(bias.ptr()));
  });
  m.def("take_bias_grad", [](const py::object& grad) -> py::object {
    const at::Tensor& g = unpack(grad.ptr());
    const auto take = backend_of(g).take_bias_grad;
    const at::Tensor found = take != nullptr ? take(g) : at::Tensor();
    if (!found.defined()) return py::none();
    return wrap(found);
  });
#ifdef TR_WITH_CUDA
  m.def("graph_nodes", graph_nodes);
  m.def("current_capture", current_capture);
  m.def("settle_joins", settle_joins);
  m.def("forget_joins", forget_joins);
#endif
  m.attr("CONTROL_RESULTS") = int{kChainResults};
  m.attr("GRAD_NORM") = int{kGradNorm};
  m.attr("AVERAGED") = int{kAveraged};
  m.attr("NORM_PARTIALS") = 2 * kNormPartials;
  py::class_<HostStep>(m, "HostStep", collected<HostStep>())
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
      .def("accumulated", &HostStep::accumulated)
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
  m.def("low_weight", [](const py::object& param, const py::object& low) {
    return wrap(low_weight(unpack(param.ptr()), unpack(low.ptr())));
  });
  m.def("renew_accumulators", [](const py::list& params) {
    for (const auto& p : params) renew_accumulator(unpack(p.ptr()));
  });
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
