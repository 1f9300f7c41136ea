// SPDX-License-Identifier: BSD-3-Clause
// What autograd knows of a batch norm of ours, and of what has joined it; see Note [What follows]
// in batch_norm_joins.cpp.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <optional>
#include <string>
#include <utility>

#include "batch_norm_launches.h"

namespace torch_renaissance {

struct NormState {
  using SavedVariable = torch::autograd::SavedVariable;

  SavedVariable input, weight, bias;
  SavedVariable result;  // if `relu`
  at::Tensor mean, invstd;
  double eps = 0;
  bool relu = false, residual = false;

  // While something may still join: the kernel that wrote the output, what it does, and the
  // output's version.
  CapturedNode kernel;
  BatchNorm norm{};
  uint32_t version = 0;
};

// What a node gets beside autograd, in one call of backward; see Note [Beside autograd].
struct Handed {
  at::Tensor grad;    // of ReLU's result, and
  at::Tensor result;  // that; or neither
  at::Tensor more;    // to be added
};

// A node that may hand over a gradient to another one, and be handed one.
class JointNode : public torch::autograd::Node {
 public:
  using variable_list = torch::autograd::variable_list;
  using Node::Node;

  // Whether this node has a kernel that adds `more` of what is handed over.
  virtual bool adds(const Handed& handed) const = 0;

  // Hands over to the node of `edge` what `from` would else return for it. False where autograd has
  // to do it.
  static bool hand_over(Node& from, const torch::autograd::Edge& edge, Handed handed);

 protected:
  Handed handed();  // to this node, in this call of backward

 private:
  bool may_take_from(Node& from);

  Handed handed_;
  int task_ = -1;  // which call of backward that was
};

class BatchNormNode : public JointNode {
 public:
  NormState state;

  explicit BatchNormNode(torch::autograd::edge_list&& edges) : JointNode(std::move(edges)) {}

  std::string name() const override { return "torch_renaissance::BatchNormBackward"; }
  bool adds(const Handed& handed) const override {
    return state.residual && (state.relu || handed.result.defined());
  }
  void release_variables() override;
  variable_list apply(variable_list&& grads) override;

 private:
  variable_list by_torch(const at::Tensor& grad);
};

// Makes `y` the output of a node with this state.
void set_node(const at::Tensor& y, torch::autograd::edge_list&& edges, NormState&& state);

// The node of a tensor that a captured batch norm has written last, or null.
BatchNormNode* node_of(const at::Tensor& y);

// Whether the kernels take such a call of torch.nn.functional.batch_norm.
bool takes_norm(const at::Tensor& x,
                const std::optional<at::Tensor>& weight,
                const std::optional<at::Tensor>& bias,
                const std::optional<at::Tensor>& running_mean,
                const std::optional<at::Tensor>& running_var,
                bool training);

// Of a tensor whose channels are side by side in memory, row after row.
at::MemoryFormat format_of_rows(const at::Tensor& t);

}  // namespace torch_renaissance
