// SPDX-License-Identifier: BSD-3-Clause
// Python objects looked at from C++, without references of their own where a call is short.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "autograd.h"

namespace torch_renaissance {
namespace py = pybind11;

inline PyObject* name(const char* text) { return PyUnicode_InternFromString(text); }

extern std::ptrdiff_t tensor_offset;  // of the at::Tensor in a Python tensor
void find_tensor_offset();            // at import, before anything is unpacked
bool is_tensor(PyObject* object);     // as isinstance()
py::object wrap(const at::Tensor& tensor);

inline const at::Tensor& unpack(PyObject* tensor) {
  return *reinterpret_cast<const at::Tensor*>(reinterpret_cast<const char*>(tensor) +
                                              tensor_offset);
}

inline const void* data_of(PyObject* tensor) {
  const at::Tensor& t = unpack(tensor);
  return t.has_storage() ? t.unsafeGetTensorImpl()->data() : nullptr;
}

// Of a tensor: whether Python has hooks on it. torch keeps its side of one that was removed.
inline bool has_hooks(PyObject* tensor) {
  if (!may_have_hooks(unpack(tensor))) return false;
  for (const char* key : {"_backward_hooks", "_post_accumulate_grad_hooks"}) {
    const py::object hooks = py::getattr(tensor, key, py::none());
    if (!hooks.is_none() && py::len(hooks) > 0) return true;
  }
  return false;
}

inline double number(PyObject* o) {
  if (PyFloat_Check(o)) return PyFloat_AS_DOUBLE(o);
  if (is_tensor(o)) return unpack(o).item().toDouble();
  const double value = PyFloat_AsDouble(o);
  if (value == -1.0 && PyErr_Occurred()) throw py::error_already_set();
  return value;
}

// Of a dict, borrowed; KeyError where it is missing.
inline PyObject* get(PyObject* dict, PyObject* key) {
  PyObject* o = PyDict_GetItemWithError(dict, key);
  if (o == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, key);
    throw py::error_already_set();
  }
  return o;
}

// Of a dict, borrowed; null where it is missing or None.
inline PyObject* find(PyObject* dict, PyObject* key) {
  PyObject* o = PyDict_GetItem(dict, key);
  return o == Py_None ? nullptr : o;
}

inline bool truth(PyObject* dict, PyObject* key) {
  PyObject* o = PyDict_GetItem(dict, key);
  const int is = o == nullptr ? 0 : PyObject_IsTrue(o);
  if (is < 0) throw py::error_already_set();
  return is != 0;
}

// Lets the garbage collector see what a T holds, so that a cycle through it is freed.
template <typename T>
py::custom_type_setup collected() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject* type = &heap_type->ht_type;
    type->tp_flags |= Py_TPFLAGS_HAVE_GC;
    type->tp_traverse = [](PyObject* self, visitproc visit, void* arg) {
      Py_VISIT(Py_TYPE(self));
      if (!py::detail::is_holder_constructed(self)) return 0;
      return py::cast<T&>(py::handle(self)).traverse(visit, arg);
    };
    type->tp_clear = [](PyObject* self) {
      if (py::detail::is_holder_constructed(self)) py::cast<T&>(py::handle(self)).release();
      return 0;
    };
  });
}

// An attribute of the optimizer that GradScaler sets for the time of a step.
inline std::optional<at::Tensor> scalar(const py::dict& own, PyObject* key) {
  PyObject* o = find(own.ptr(), key);
  if (o == nullptr) return std::nullopt;
  if (!is_tensor(o) || unpack(o).numel() != 1) {
    throw py::type_error("optimizer." + py::str(key).cast<std::string>() +
                         " must be a tensor of one element, got " +
                         py::repr(o).cast<std::string>());
  }
  return unpack(o);
}

}  // namespace torch_renaissance
