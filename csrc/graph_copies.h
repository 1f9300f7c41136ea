// SPDX-License-Identifier: BSD-3-Clause
// The copies around a captured step, of a batch into its static inputs and of its results into
// tensors that keep their value: nodes of its graph.
#pragma once

#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "backend.h"
#include "checks.h"
#include "python_objects.h"

namespace torch_renaissance {

// Whether bytes can be copied one after the other.
inline bool is_plain_copy(const at::Tensor& to, const at::Tensor& from) {
  return to.device() == from.device() && to.scalar_type() == from.scalar_type() &&
         same_layout(to, from) && to.is_non_overlapping_and_dense() && !from.is_neg() &&
         !from.is_conj();
}

// Results: small ones come from a stock of buffers, each of which is lent out until its tensor
// dies; large ones are allocated, and so are small ones where a program keeps more than the stock
// has, as the losses of an epoch: looking through those would take longer than a step.
class Stock {
 public:
  explicit Stock(at::Tensor source) : source_(std::move(source)) {}

  const at::Tensor& source() const { return source_; }

  at::Tensor take() {
    if (source_.nbytes() > kSmall || source_.numel() == 0) return fresh();
    for (const Buffer& b : buffers_) {
      if (!b.taken->load(std::memory_order_acquire)) return lend(b);
    }
    if (buffers_.size() == kMostBuffers) return fresh();
    buffers_.push_back({fresh(), std::make_shared<std::atomic<bool>>(false)});
    return lend(buffers_.back());
  }

 private:
  static constexpr size_t kSmall = 4096, kMostBuffers = 64;

  struct Buffer {
    at::Tensor memory;
    std::shared_ptr<std::atomic<bool>> taken;
  };

  at::Tensor fresh() const {
    const at::Tensor& s = source_;
    return s.is_non_overlapping_and_dense() ? at::empty_strided(s.sizes(), s.strides(), s.options())
                                            : at::empty(s.sizes(), s.options());
  }

  static at::Tensor lend(const Buffer& b) {
    b.taken->store(true, std::memory_order_relaxed);
    const auto give_back = [memory = b.memory, taken = b.taken](void*) {
      taken->store(false, std::memory_order_release);
    };
    const at::Tensor& m = b.memory;
    return at::from_blob(m.data_ptr(), m.sizes(), m.strides(), give_back, m.options(), m.device());
  }

  at::Tensor source_;
  std::vector<Buffer> buffers_;
};

// One node of a graph for every kMaxCopies copies. Each replay sets their addresses first.
class CopyNodes {
 public:
  // In a capture: adds the nodes for those that are on the GPU.
  template <typename Item, typename TensorOf>
  void capture(const std::vector<Item>& items, TensorOf tensor_of) {
    std::vector<at::Tensor> captured;
    for (const Item& item : items) {
      if (tensor_of(item).is_cuda()) captured.push_back(tensor_of(item));
    }
    for (size_t i = 0; i < captured.size(); i += kMaxCopies) {
      Copies none{};
      none.n = static_cast<int>(std::min<size_t>(kMaxCopies, captured.size() - i));
      nodes_.push_back({cuda_backend.capture_copy(none, captured[0]), none, none});
    }
  }

  // Nothing is copied where `from` is `to`, or not at all (`from` isn't defined).
  void set(size_t i, const at::Tensor& to, const at::Tensor& from) {
    const bool copied =
        from.defined() && to.numel() > 0 && to.const_data_ptr() != from.const_data_ptr();
    auto& item = nodes_[i / kMaxCopies].wanted.item[i % kMaxCopies];
    if (copied) {
      item = {to.data_ptr(), from.const_data_ptr(), static_cast<int64_t>(to.nbytes())};
    } else {
      item = {};
    }
  }

  void apply(uint64_t exec) {
    for (Node& n : nodes_) {
      if (std::memcmp(&n.wanted, &n.present, sizeof(Copies)) == 0) continue;
      cuda_backend.set_copy(exec, n.handle, n.wanted);
      n.present = n.wanted;
    }
  }

 private:
  struct Node {
    void* handle;
    Copies present, wanted;
  };
  std::vector<Node> nodes_;
};

class GraphCopies {
 public:
  // At the beginning of a capture. None stands for what isn't a tensor.
  explicit GraphCopies(const py::tuple& inputs) {
    for (size_t i = 0; i < inputs.size(); ++i) {
      PyObject* to = PyTuple_GET_ITEM(inputs.ptr(), i);
      if (to != Py_None) inputs_.push_back({i, unpack(to)});
    }
    into_.capture(inputs_, [](const Input& i) { return i.to; });
  }

  // Once they are there. Results that the host has are constants.
  void add_results(const py::list& results) {
    for (const auto& r : results) {
      const at::Tensor& t = unpack(r.ptr());
      const bool plain = t.is_non_overlapping_and_dense() && !t.is_neg() && !t.is_conj();
      results_.emplace_back(plain ? t : t.clone());
    }
    out_.capture(results_, [](const Stock& r) { return r.source(); });
  }

  // Before a replay of `exec`, a cudaGraphExec_t: gives it a batch and the tensors that it is to
  // fill, which are returned.
  py::list prepare(uint64_t exec, const py::tuple& batch) {
    set_aside(batch);
    size_t node_place = 0;
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const at::Tensor& to = inputs_[i].to;
      const at::Tensor& from = aside_[i].defined() ? aside_[i] : given(inputs_[i], batch);
      const bool plain = to.is_cuda() && is_plain_copy(to, from);
      if (to.is_cuda()) into_.set(node_place++, to, plain ? from : at::Tensor());
      if (plain) continue;
      const at::AutoDispatchBelowADInplaceOrView guard;
      to.copy_(from, /*non_blocking=*/false);  // the program may refill its memory at once
    }
    into_.apply(exec);
    py::list found;
    node_place = 0;
    for (Stock& r : results_) {
      at::Tensor to = r.take();
      if (to.is_cuda()) {
        out_.set(node_place++, to, r.source());
      } else {
        to.copy_(r.source());
      }
      found.append(wrap(to));
    }
    out_.apply(exec);
    return found;
  }

 private:
  struct Input {
    size_t place;  // in the batch
    at::Tensor to;
  };

  static const at::Tensor& given(const Input& input, const py::tuple& batch) {
    return unpack(PyTuple_GET_ITEM(batch.ptr(), input.place));
  }

  // Copies go side by side, so what lies in memory that another of them writes is copied before.
  void set_aside(const py::tuple& batch) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    aside_.assign(inputs_.size(), at::Tensor());
    for (size_t i = 0; i < inputs_.size(); ++i) {
      const at::Tensor &to = inputs_[i].to, &from = given(inputs_[i], batch);
      if (from.const_data_ptr() == to.const_data_ptr() && same_layout(to, from)) continue;
      const auto* memory = from.storage().unsafeGetStorageImpl();
      const bool written = std::any_of(inputs_.begin(), inputs_.end(), [&](const Input& other) {
        return other.to.storage().unsafeGetStorageImpl() == memory;
      });
      if (written) aside_[i] = from.clone();
    }
  }

  std::vector<Input> inputs_;
  std::vector<at::Tensor> aside_;  // what set_aside() copied, for one replay
  std::vector<Stock> results_;
  CopyNodes into_, out_;
};

}  // namespace torch_renaissance
