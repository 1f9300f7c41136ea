// SPDX-License-Identifier: BSD-3-Clause
// Compiled as one: the toolkit's headers take longer than these files together.
#include "../cuda/columns.cu"
#include "../cuda/copy.cu"
#include "../cuda/heads.cu"
#include "../cuda/init.cu"
#include "../cuda/lars_norms.cu"
#include "../cuda/layer_norm.cu"
#include "../cuda/max_pool.cu"
#include "../cuda/norm.cu"
#include "../cuda/order.cu"
#include "../cuda/pack.cu"
