// SPDX-License-Identifier: BSD-3-Clause
// Around a replay: fills a captured step's inputs and hands its results out as tensors that keep
// their value, each by one launch for all of them.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <atomic>
#include <memory>
#include <vector>

#include "backend.h"
#include "checks.h"
#include "python_objects.h"

namespace torch_renaissance {

// Collects copies and launches them together; what a plain copy can't do goes through torch.
class CopyList {
 public:
  void add(const at::Tensor& to, const at::Tensor& from) {
    if (to.numel() == 0) return;
    const bool plain = to.device() == from.device() && to.scalar_type() == from.scalar_type() &&
                       same_layout(to, from) && to.is_non_overlapping_and_dense() &&
                       !from.is_neg() && !from.is_conj();
    if (!plain) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      to.copy_(from, /*non_blocking=*/false);  // the program may refill its memory at once
      return;
    }
    if (to.const_data_ptr() == from.const_data_ptr()) return;
    if (copies_.n == kMaxCopies || (copies_.n > 0 && like_.device() != to.device())) run();
    copies_.item[copies_.n++] = {
        to.data_ptr(), from.const_data_ptr(), static_cast<int64_t>(to.nbytes())};
    like_ = to;
  }

  void run() {
    if (copies_.n > 0) backend_of(like_).copy(copies_, like_);
    copies_.n = 0;
  }

 private:
  Copies copies_;
  at::Tensor like_;
};

// Static inputs take the values of `batch`; None stands for what isn't a tensor.
inline void copy_inputs(const py::tuple& inputs, const py::tuple& batch) {
  CopyList list;
  for (size_t i = 0; i < inputs.size(); ++i) {
    PyObject* to = PyTuple_GET_ITEM(inputs.ptr(), i);
    if (to != Py_None) list.add(unpack(to), unpack(PyTuple_GET_ITEM(batch.ptr(), i)));
  }
  list.run();
}

// Copies of a captured step's outputs. Small ones come from a stock of buffers, each of which is
// free again when the tensors over it are gone, so a long run allocates nothing.
class Results {
 public:
  explicit Results(const py::list& outputs) {
    for (const auto& o : outputs) outputs_.push_back({unpack(o.ptr()), {}});
  }

  py::list take() {
    CopyList list;
    py::list found;
    for (Output& o : outputs_) {
      at::Tensor copy = o.source.nbytes() <= kSmall ? o.from_stock() : fresh(o.source);
      list.add(copy, o.source);
      found.append(py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(copy))));
    }
    list.run();
    return found;
  }

 private:
  static constexpr size_t kSmall = 4096;

  struct Buffer {
    at::Tensor memory;
    std::shared_ptr<std::atomic<bool>> taken;
  };

  struct Output {
    at::Tensor source;
    std::vector<Buffer> stock;

    at::Tensor from_stock() {
      for (const Buffer& b : stock) {
        if (!b.taken->load(std::memory_order_acquire)) return lend(b);
      }
      stock.push_back({fresh(source), std::make_shared<std::atomic<bool>>(false)});
      return lend(stock.back());
    }
  };

  static at::Tensor fresh(const at::Tensor& like) {
    const bool dense = like.is_non_overlapping_and_dense();
    return dense ? at::empty_strided(like.sizes(), like.strides(), like.options())
                 : at::empty(like.sizes(), like.options());
  }

  static at::Tensor lend(const Buffer& b) {
    if (b.memory.numel() == 0) return fresh(b.memory);
    b.taken->store(true, std::memory_order_relaxed);
    const auto give_back = [memory = b.memory, taken = b.taken](void*) {
      taken->store(false, std::memory_order_release);
    };
    const at::Tensor& m = b.memory;
    return at::from_blob(m.data_ptr(), m.sizes(), m.strides(), give_back, m.options(), m.device());
  }

  std::vector<Output> outputs_;
};

}  // namespace torch_renaissance
