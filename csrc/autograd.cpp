// SPDX-License-Identifier: BSD-3-Clause
// What captured steps need of torch's autograd that Python can't reach, and what other files need
// of its heavier headers.
#include <ATen/ops/alias.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include <type_traits>

#include "python_objects.h"

namespace torch_renaissance {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Stands a 16-bit copy in for a float32 parameter, without a kernel either way. The copy goes
// forward; its 16-bit gradient goes back to the parameter as it is. As a new tensor object: one
// that Python has seen counts as shared, and autograd would clone it into .grad.
struct Low : torch::autograd::Function<Low> {
  static Variable forward(AutogradContext*, const Variable& /*param*/, const Variable& low) {
    return low.alias();
  }
  static variable_list backward(AutogradContext*, variable_list grads) {
    return {grads[0].defined() ? grads[0].alias() : Variable(), Variable()};
  }
};

py::object low_weight(const py::object& param, const py::object& low) {
  return wrap(Low::apply(unpack(param.ptr()), unpack(low.ptr())));
}

// The pointer's type depends on the version of torch.
template <typename Pointer>
void forget_node(void (*set)(const Variable&, Pointer), const Variable& t) {
  if constexpr (std::is_default_constructible_v<Pointer>) {
    set(t, Pointer());
  } else {
    set(t, Pointer(c10::intrusive_ptr<torch::autograd::Node>()));
  }
}

// Whoever keeps a tensor made from a parameter (a clone, say) keeps the node that accumulates its
// gradient, with the stream of its making; a capture on another stream can't use it. The parameter
// gets a new node; the old one still serves who keeps it. Nodes with hooks (DDP's) stay.
void renew_accumulators(const py::list& params) {
  for (const auto& p : params) {
    const at::Tensor& t = unpack(p.ptr());
    if (!t.requires_grad() || !t.is_leaf()) continue;
    const auto node = torch::autograd::impl::try_get_grad_accumulator(t);
    if (node == nullptr || !node->post_hooks().empty() || !node->pre_hooks().empty()) continue;
    forget_node(torch::autograd::impl::set_grad_accumulator, t);
  }
}

}  // namespace

const std::ptrdiff_t kTensorOffset = [] {
  alignas(THPVariable) static char none[sizeof(THPVariable)] = {};
  const at::Tensor& inside = THPVariable_Unpack(reinterpret_cast<THPVariable*>(none));
  return reinterpret_cast<const char*>(&inside) - none;
}();

bool is_tensor(PyObject* object) { return THPVariable_Check(object); }

bool may_have_hooks(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  return meta != nullptr && !(meta->hooks_.empty() && meta->post_acc_grad_hooks_ == nullptr);
}

py::object wrap(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// By its type alone: isinstance() asks the object, which may run anything.
const c10::TensorImpl* tensor_in(PyObject* o) {
  if (!PyObject_TypeCheck(o, reinterpret_cast<PyTypeObject*>(THPVariableClass))) return nullptr;
  return unpack(o).unsafeGetTensorImpl();
}

void bind_autograd(py::module_& m) {
  m.def("low_weight", low_weight);
  m.def("renew_accumulators", renew_accumulators);
}

}  // namespace torch_renaissance
