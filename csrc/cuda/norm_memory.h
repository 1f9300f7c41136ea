// SPDX-License-Identifier: BSD-3-Clause
// What blocks of a launch leave for the last one of their tile: memory for it, and tickets.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "batch_norm.h"

namespace torch_renaissance {

struct NormMemory {
  NormScratch pointers{};
  at::Tensor partials, tickets;

  NormMemory(const NormTiling& tiling, const at::Tensor& like, cudaStream_t stream) {
    if (tiling.cluster) return;
    partials = at::empty({tiling.partials()}, like.options().dtype(at::kFloat));
    pointers.partials = partials.mutable_data_ptr<float>();
    pointers.first_ticket = take_tickets(stream, tiling.tiles);
    if (pointers.first_ticket == kTickets) {  // none left: one more node in the graph
      tickets = at::zeros({tiling.tiles}, like.options().dtype(at::kInt));
      pointers.tickets = tickets.mutable_data_ptr<int32_t>();
    }
  }
};

}  // namespace torch_renaissance
