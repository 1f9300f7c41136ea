// SPDX-License-Identifier: BSD-3-Clause
// What runs on a device. The device files fill these in, so nobody needs their headers.
#pragma once

#include <ATen/core/Tensor.h>

#include "copies.h"
#include "update.h"

namespace torch_renaissance {

// `like` names the device; work goes to its current stream.
struct Backend {
  void (*update)(const Update&, const at::Tensor& like) = nullptr;
  void (*norm)(const Norm&, const at::Tensor& like) = nullptr;
  // Both in one launch: false, and nothing is done, where that can't be. May be null.
  bool (*checked_update)(const Norm&, const Update&, const at::Tensor& like) = nullptr;
  void (*slot_norms)(const Norm&, const at::Tensor& like) = nullptr;  // of each tensor, besides
  void (*pack)(const Pack&, const at::Tensor& like) = nullptr;
  void (*write)(double* to, at::ArrayRef<double> values, const at::Tensor& like) = nullptr;
  // Copies as a node of the graph that is being captured, and other ones in a node of an
  // instantiated graph (cudaGraphExec_t). Only CUDA has them.
  void* (*capture_copy)(const Copies&, const at::Tensor& like) = nullptr;
  void (*set_copy)(uint64_t exec, void* node, const Copies&) = nullptr;
  bool (*is_capturing)() = nullptr;
  // Adds a convolution's bias to its output, or does nothing and returns false. May be null.
  bool (*add_channel_bias)(const at::Tensor& output, const at::Tensor& bias) = nullptr;
  // Its gradient, if that came with the output's; else undefined.
  at::Tensor (*take_bias_grad)(const at::Tensor& grad) = nullptr;
};

inline Backend cpu_backend, cuda_backend;

inline const Backend& backend_of(const at::Tensor& t) {
  return t.is_cuda() ? cuda_backend : cpu_backend;
}

}  // namespace torch_renaissance
