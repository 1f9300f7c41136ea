// SPDX-License-Identifier: BSD-3-Clause
// How Python values are compared with what they were, and how a person reads them. No comparison
// runs Python code or raises.
#pragma once

#include <c10/core/TensorImpl.h>
#include <c10/util/DimVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <cmath>
#include <string>

namespace torch_renaissance {
namespace py = pybind11;

// The tensor that an object is, or null. In python_objects.cpp.
const c10::TensorImpl* tensor_in(PyObject* o);

// Values that are what they say: another object that says the same will do.
inline bool is_plain(PyObject* o) {
  if (o == Py_None || PyFloat_CheckExact(o) || PyLong_CheckExact(o) || PyBool_Check(o) ||
      PyUnicode_CheckExact(o) || PyComplex_CheckExact(o) || THPDtype_Check(o) ||
      THPDevice_Check(o)) {
    return true;
  }
  if (!PyTuple_CheckExact(o)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(o); ++i) {
    if (!is_plain(PyTuple_GET_ITEM(o, i))) return false;
  }
  return true;
}

// NaN is NaN, and -0.0 is not 0.0: a step computes something else with it.
inline bool same_number(double a, double b) {
  return (a == b && std::signbit(a) == std::signbit(b)) || (std::isnan(a) && std::isnan(b));
}

inline bool same_plain(PyObject* was, PyObject* is) {
  if (was == is) return true;
  if (Py_TYPE(was) != Py_TYPE(is)) return false;
  if (PyFloat_CheckExact(was)) {
    return same_number(PyFloat_AS_DOUBLE(was), PyFloat_AS_DOUBLE(is));
  }
  if (PyLong_CheckExact(was) || PyUnicode_CheckExact(was)) {
    return PyObject_RichCompareBool(was, is, Py_EQ) == 1;
  }
  if (PyComplex_CheckExact(was)) {
    const Py_complex a = PyComplex_AsCComplex(was), b = PyComplex_AsCComplex(is);
    return same_number(a.real, b.real) && same_number(a.imag, b.imag);
  }
  if (THPDevice_Check(was)) {
    return reinterpret_cast<THPDevice*>(was)->device == reinterpret_cast<THPDevice*>(is)->device;
  }
  if (!PyTuple_CheckExact(was) || PyTuple_GET_SIZE(was) != PyTuple_GET_SIZE(is)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(was); ++i) {
    if (!same_plain(PyTuple_GET_ITEM(was, i), PyTuple_GET_ITEM(is, i))) return false;
  }
  return true;
}

// The same object or, of plain values, an equal one of the same type.
inline bool same_value(PyObject* was, PyObject* is) {
  return was == is || (Py_TYPE(was) == Py_TYPE(is) && is_plain(was) && same_plain(was, is));
}

inline Py_ssize_t length(PyObject* container) {
  if (PyDict_Check(container)) return PyDict_GET_SIZE(container);
  return PyList_Check(container) ? PyList_GET_SIZE(container) : PySet_GET_SIZE(container);
}

// A dict's value, or null.
inline PyObject* find_in(PyObject* dict, PyObject* key) {
  PyObject* value = PyDict_GetItemWithError(dict, key);
  if (value == nullptr) PyErr_Clear();
  return value;
}

// What a captured step bakes in of a tensor: its form and where its data are, but no contents.
class TensorFacts {
 public:
  explicit TensorFacts(const c10::TensorImpl* t)
      : keys_(t->key_set()), requires_grad_(t->requires_grad()) {
    if (keys_.has_any(c10::python_ks) || !is_readable(t)) return;
    try {
      sizes_ = t->sizes();
      strides_ = t->strides();
      offset_ = t->storage_offset();
      device_ = t->device();
      dtype_ = t->dtype();
      base_ = base_of(t);
      version_ = version_of(t);
      strided_ = true;
    } catch (const c10::Error&) {  // nested and others that have no sizes to tell
    }
  }

  // Sparse and nested tensors and those that dispatch to Python have no strides to compare.
  bool strided() const { return strided_; }
  bool requires_grad() const { return requires_grad_; }

  bool same_form(const c10::TensorImpl* t) const {
    if (t->key_set() != keys_ || t->requires_grad() != requires_grad_) return false;
    return !strided_ ||
           (is_readable(t) && t->dtype() == dtype_ && t->device() == device_ &&
            t->sizes() == c10::IntArrayRef(sizes_) && t->strides() == c10::IntArrayRef(strides_));
  }

  bool same_address(const c10::TensorImpl* t) const {
    return !strided_ || (base_of(t) == base_ && t->storage_offset() == offset_);
  }

  bool same_place(const c10::TensorImpl* t) const {
    return !strided_ ||
           (base_of(t) == base_ && t->storage_offset() == offset_ && version_of(t) == version_);
  }

  // As in "float32[64, 10] on cuda:0".
  std::string text() const {
    if (!strided_) return "a tensor without strides";
    const c10::ScalarType dtype = c10::typeMetaToScalarType(dtype_);
    std::string text = std::string(torch::getTHPDtype(dtype)->name) + list(sizes_);
    int64_t dense = 1;
    bool contiguous = true;
    for (size_t d = sizes_.size(); d-- > 0; dense *= sizes_[d]) {
      contiguous = contiguous && (sizes_[d] == 1 || strides_[d] == dense);
    }
    if (!contiguous) text += " with strides " + list(strides_);
    if (keys_.has(c10::DispatchKey::Conjugate)) text += ", conjugated,";
    if (keys_.has(c10::DispatchKey::Negative)) text += ", negated,";
    return text + " on " + device_.str();
  }

 private:
  // One number on the CPU goes into kernels by value, so its changes in place count.
  static int64_t version_of(const c10::TensorImpl* t) {
    const bool counts = t->device().is_cpu() && t->numel() == 1 && t->version_counter().enabled();
    return counts ? static_cast<int64_t>(t->version_counter().current_version()) : -1;
  }
  int64_t version_ = -1;
  static bool is_readable(const c10::TensorImpl* t) {
    return t->has_storage() && !t->has_symbolic_sizes_strides();
  }

  // Where the storage begins, even if its data may not be read (fake tensors).
  static const void* base_of(const c10::TensorImpl* t) {
    return t->unsafe_storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  }

  static std::string list(const c10::DimVector& numbers) {
    std::string text = "[";
    for (size_t i = 0; i < numbers.size(); ++i) {
      text += (i == 0 ? "" : ", ") + std::to_string(numbers[i]);
    }
    return text + "]";
  }

  c10::DispatchKeySet keys_;
  const void* base_ = nullptr;
  int64_t offset_ = 0;
  caffe2::TypeMeta dtype_;
  c10::Device device_{c10::kCPU};
  bool requires_grad_;
  bool strided_ = false;
  c10::DimVector sizes_, strides_;
};

inline std::string type_name(const PyTypeObject* type) {
  const std::string full = type->tp_name;
  return full.substr(full.rfind('.') + 1);
}

inline std::string with_article(const std::string& noun) {
  const bool vowel = std::string("AEIOUaeiou").find(noun.substr(0, 1)) != std::string::npos;
  return (vowel ? "an " : "a ") + noun;
}

// Plain values as Python writes them, others by their type.
inline std::string shown(PyObject* o) {
  constexpr size_t kLongest = 60;
  if (tensor_in(o) != nullptr) return "a tensor";
  if (is_plain(o)) {
    try {
      const py::str text = py::repr(o);
      if (py::len(text) <= kLongest) return text;
      return std::string(py::str(text[py::slice(0, kLongest, 1)])) + "...";
    } catch (const py::error_already_set&) {  // an int of too many digits
    }
  }
  return with_article(type_name(Py_TYPE(o)));
}

}  // namespace torch_renaissance
