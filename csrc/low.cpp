// SPDX-License-Identifier: BSD-3-Clause
// Stands a 16-bit copy in for a float32 parameter, without a kernel either way.
#include <ATen/ops/alias.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/custom_function.h>

#include "python_objects.h"

namespace torch_renaissance {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// The copy goes forward; its 16-bit gradient goes back to the parameter as it is. As a new tensor
// object: one that Python has seen counts as shared, and autograd would clone it into .grad.
struct Low : torch::autograd::Function<Low> {
  static Variable forward(AutogradContext*, const Variable& /*param*/, const Variable& low) {
    return low.alias();
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0].defined() ? grads[0].alias() : Variable(), Variable()};
  }
};

py::object low_weight(const py::object& param, const py::object& low) {
  return py::reinterpret_steal<py::object>(
      THPVariable_Wrap(Low::apply(unpack(param.ptr()), unpack(low.ptr()))));
}

}  // namespace

void bind_low(py::module_& m) { m.def("low_weight", low_weight); }

}  // namespace torch_renaissance
