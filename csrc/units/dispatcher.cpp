// SPDX-License-Identifier: BSD-3-Clause
// Compiled as one: torch/library.h and autograd's headers take longer than these files together.
#include "../augment.cpp"
#include "../augment_program.cpp"
#include "../autocast_rules.cpp"
#include "../autograd.cpp"
#include "../cpu/backend.cpp"
#include "../cross_entropy.cpp"
#include "../cross_entropy_autograd.cpp"
#include "../draw_batch.cpp"
#include "../init.cpp"
#include "../ops.cpp"
#include "../order.cpp"
#ifdef TR_WITH_CUDA
#include "../cuda/backend.cpp"
#include "../cuda/batch_norm_joins.cpp"
#include "../cuda/batch_norm_launches.cpp"
#include "../cuda/batch_norm_node.cpp"
#include "../cuda/batch_norm_rule.cpp"
#include "../cuda/channel_bias_backend.cpp"
#include "../cuda/cross_entropy_backend.cpp"
#include "../cuda/max_pool_autograd.cpp"
#include "../cuda/tickets.cpp"
#endif
