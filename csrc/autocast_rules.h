// SPDX-License-Identifier: BSD-3-Clause
// Within the steps that say so, autocast's rule for some of torch's functions on a GPU is a kernel
// of ours. Everywhere else they are torch's.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DispatchKeySet.h>
#include <torch/library.h>

#include <string>

namespace torch_renaissance {

// What follows a rule of autocast: torch's own, to which a rule hands what isn't for it.
inline constexpr c10::DispatchKeySet kBelowAutocast(c10::DispatchKeySet::FULL_AFTER,
                                                    c10::DispatchKey::AutocastCUDA);

// How many steps are running whose kernels these are. Not by thread, since what is checkpointed is
// computed again in one of autograd's.
void count_autocast_steps(int64_t change);

// torch.func's transforms take no autograd functions written in C++.
bool transforms_active();

// Whether this is a call within such a step, on a plain tensor: what is traced for a compiler gets
// the kernels that the compiler makes.
bool within_step(const at::Tensor& input);

// A dense tensor on a GPU and nothing more: not batched, named, negated, traced or of a subclass.
bool is_plain(const at::Tensor& t);

// For vectors of 16 bytes.
bool is_aligned(const at::Tensor& t);
// The tensor, or where it isn't aligned a copy in its layout.
at::Tensor aligned(const at::Tensor& t);

// An op, as what a rule hands on to.
template <typename F>
auto find_op(const char* name, const char* overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, overload).typed<F>();
}

// Add the rules for torch's functions to a library at AutocastCUDA.
void register_cross_entropy(torch::Library& aten);
void register_batch_norm(torch::Library& aten);
void register_joins(torch::Library& aten);  // of what follows batch norm in place
void register_relu(torch::Library& aten);   // after batch norm
void register_max_pool(torch::Library& aten);

// Adds one of them. Torch has had none for these functions so far; one that it gets stays.
template <typename Rule>
void add_rule(torch::Library& aten,
              const std::string& name,
              const std::string& overload,
              Rule rule) {
  const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(("aten::" + name).c_str(), overload.c_str());
  if (op.hasKernelForDispatchKey(c10::DispatchKey::AutocastCUDA)) return;
  aten.impl((overload.empty() ? name : name + "." + overload).c_str(), rule);
}

}  // namespace torch_renaissance
