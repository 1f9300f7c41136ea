// SPDX-License-Identifier: BSD-3-Clause
// Python's tensors, as torch/csrc/autograd/python_variable.h declares them: it includes half of
// torch, which takes five seconds to compile.
#include "python_objects.h"

#include <ATen/ops/empty.h>
#include <c10/macros/Export.h>

#include <cstring>
#include <stdexcept>

extern C10_IMPORT PyObject* THPVariableClass;  // torch.Tensor
C10_IMPORT PyObject* THPVariable_Wrap(const at::TensorBase& tensor);

namespace torch_renaissance {

std::ptrdiff_t tensor_offset = 0;

// A Python tensor holds its at::Tensor, which is a pointer, by value. Where, one of them tells.
void find_tensor_offset() {
  const at::Tensor tensor = at::empty({0});
  const py::object object = wrap(tensor);
  const c10::TensorImpl* const wanted = tensor.unsafeGetTensorImpl();
  const auto size = Py_TYPE(object.ptr())->tp_basicsize;
  const std::ptrdiff_t step = alignof(at::Tensor), first = sizeof(PyObject);
  const std::ptrdiff_t last = size - static_cast<std::ptrdiff_t>(sizeof(at::Tensor));
  for (std::ptrdiff_t offset = first; offset <= last; offset += step) {
    const c10::TensorImpl* found = nullptr;
    std::memcpy(&found, reinterpret_cast<const char*>(object.ptr()) + offset, sizeof found);
    if (found != wanted) continue;
    tensor_offset = offset;
    return;
  }
  throw std::runtime_error("a Python tensor of this torch doesn't hold its at::Tensor by value");
}

bool is_tensor(PyObject* object) {
  const int is = PyObject_IsInstance(object, THPVariableClass);
  if (is < 0) throw py::error_already_set();
  return is != 0;
}

py::object wrap(const at::Tensor& tensor) {
  PyObject* const object = THPVariable_Wrap(tensor);
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

// By its type alone: isinstance() asks the object, which may run anything.
const c10::TensorImpl* tensor_in(PyObject* o) {
  if (!PyObject_TypeCheck(o, reinterpret_cast<PyTypeObject*>(THPVariableClass))) return nullptr;
  return unpack(o).unsafeGetTensorImpl();
}

}  // namespace torch_renaissance
