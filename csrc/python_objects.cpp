// SPDX-License-Identifier: BSD-3-Clause
// What other files need of the header of Python's tensors.
#include "python_objects.h"

#include <torch/csrc/autograd/python_variable.h>

namespace torch_renaissance {

const std::ptrdiff_t kTensorOffset = [] {
  alignas(THPVariable) static char none[sizeof(THPVariable)] = {};
  const at::Tensor& inside = THPVariable_Unpack(reinterpret_cast<THPVariable*>(none));
  return reinterpret_cast<const char*>(&inside) - none;
}();

bool is_tensor(PyObject* object) { return THPVariable_Check(object); }

py::object wrap(const at::Tensor& tensor) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
}

// By its type alone: isinstance() asks the object, which may run anything.
const c10::TensorImpl* tensor_in(PyObject* o) {
  if (!PyObject_TypeCheck(o, reinterpret_cast<PyTypeObject*>(THPVariableClass))) return nullptr;
  return unpack(o).unsafeGetTensorImpl();
}

}  // namespace torch_renaissance
