// SPDX-License-Identifier: BSD-3-Clause
// What autograd knows of a batch norm of ours, and of what has joined it; see Note [What follows]
// in batch_norm_joins.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <mutex>
#include <string>

#include "batch_norm_launches.h"

namespace torch_renaissance {

struct NormState {
  using SavedVariable = torch::autograd::SavedVariable;

  SavedVariable input, weight, bias;
  SavedVariable result;  // if `relu`
  at::Tensor running_mean, running_var, mean, invstd;
  double eps = 0;
  bool relu = false, residual = false;

  // While something may still join: the kernel that wrote the output, what it does, and the
  // output's version.
  CapturedNode kernel;
  BatchNorm norm{};
  uint32_t version = 0;
};

struct BatchNormNode : torch::autograd::Node {
  using variable_list = torch::autograd::variable_list;

  NormState state;

  explicit BatchNormNode(torch::autograd::edge_list&& edges) : Node(std::move(edges)) {}

  std::string name() const override { return "torch_renaissance::BatchNormBackward"; }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* saved : {&state.input, &state.weight, &state.bias, &state.result}) {
      saved->reset_data();
    }
  }

  variable_list apply(variable_list&& grads) override;

 private:
  variable_list by_torch(const at::Tensor& grad);
  bool hand_over(const at::Tensor& grad);
  at::Tensor handed_over();

  at::Tensor more_;     // what was handed over to this node,
  int more_task_ = -1;  // in which call of backward
};

// Makes `y` the output of a node with this state.
void set_node(const at::Tensor& y, torch::autograd::edge_list&& edges, NormState&& state);

// A dense tensor on a GPU and nothing more: no subclass, nothing that is traced.
bool is_plain(const at::Tensor& t);

// Of a tensor whose channels are side by side in memory, row after row.
at::MemoryFormat format_of_rows(const at::Tensor& t);

}  // namespace torch_renaissance
