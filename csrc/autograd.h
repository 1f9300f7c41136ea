// SPDX-License-Identifier: BSD-3-Clause
// What captured steps need of torch's autograd that Python can't reach.
#pragma once

#include <ATen/core/Tensor.h>

namespace torch_renaissance {

// The 16-bit copy `low` in place of a float32 parameter, whose gradient it gets.
at::Tensor low_weight(const at::Tensor& param, const at::Tensor& low);

// Whoever keeps a tensor made from a parameter (a clone, say) keeps the node that accumulates its
// gradient, with the stream of its making; a capture on another stream can't use it. The parameter
// gets a new node; the old one still serves who keeps it. Nodes with hooks (DDP's) stay.
void renew_accumulator(const at::Tensor& param);

bool may_have_hooks(const at::Tensor& tensor);

}  // namespace torch_renaissance
