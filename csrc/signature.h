// SPDX-License-Identifier: BSD-3-Clause
// What a captured step fixes of its arguments: the form of tensors, and all else as it is. Of a
// list or dict that is its identity and nothing in it: pass the leaves.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "values.h"

namespace torch_renaissance {

class Signature {
 public:
  explicit Signature(const py::tuple& args) {
    for (const py::handle arg : args) {
      const c10::TensorImpl* impl = tensor_in(arg.ptr());
      const auto held = py::reinterpret_borrow<py::object>(impl ? py::type::handle_of(arg) : arg);
      arguments_.push_back({held, impl ? std::make_optional<TensorFacts>(impl) : std::nullopt});
    }
  }

  // A graph for `args_` can take `args`. Never so with a tensor that has no strides.
  bool fits(const py::tuple& args) const {
    if (args.size() != arguments_.size()) return false;
    for (size_t i = 0; i < arguments_.size(); ++i) {
      const auto& [held, facts] = arguments_[i];
      PyObject* arg = PyTuple_GET_ITEM(args.ptr(), i);
      if (!facts) {
        if (!same_value(held.ptr(), arg)) return false;
        continue;
      }
      if (reinterpret_cast<PyObject*>(Py_TYPE(arg)) != held.ptr() || !facts->strided() ||
          !facts->same_form(tensor_in(arg))) {
        return false;
      }
    }
    return true;
  }

  // As in "float32[200, 784] on cuda:0, int64[200] on cuda:0, 0.5".
  std::string text() const {
    std::string text;
    for (const auto& [held, facts] : arguments_) {
      if (!text.empty()) text += ", ";
      text += facts ? text_of(held.ptr(), *facts) : shown(held.ptr());
    }
    return text;
  }

  void release() { std::vector<Argument>().swap(arguments_); }

  int traverse(visitproc visit, void* arg) const {
    for (const Argument& a : arguments_) Py_VISIT(a.held.ptr());
    return 0;
  }

 private:
  // A tensor's type and facts, so that no batch is kept alive; any other object itself.
  struct Argument {
    py::object held;
    std::optional<TensorFacts> facts;
  };

  static std::string text_of(PyObject* type, const TensorFacts& facts) {
    const std::string name = type_name(reinterpret_cast<PyTypeObject*>(type));
    const std::string text = name == "Tensor" ? facts.text() : name + " " + facts.text();
    return facts.requires_grad() ? text + " (requires grad)" : text;
  }

  std::vector<Argument> arguments_;
};

}  // namespace torch_renaissance
