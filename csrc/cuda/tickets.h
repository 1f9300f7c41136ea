// SPDX-License-Identifier: BSD-3-Clause
// Which of the device's tickets a launch may use; see Note [One launch] in cross_entropy.cuh.
#pragma once

#include <cuda_runtime_api.h>

namespace torch_renaissance {

// Tickets that the device holds, zero when the program starts.
inline constexpr int kTickets = 1 << 16;
inline constexpr int kMostTickets = 64;  // that a launch may have

// The first of `count` tickets for a launch on `stream`, or kTickets where none are left. Launches
// of a stream share them, a captured launch has its own.
int take_tickets(cudaStream_t stream, int count);

}  // namespace torch_renaissance
