// SPDX-License-Identifier: BSD-3-Clause
// Compiled as one: the headers take longer than these files together.
#include "../cpu/augment.cpp"
#include "../cpu/cross_entropy.cpp"
#include "../cpu/gradients.cpp"
#include "../cpu/init.cpp"
#include "../cpu/lars_norms.cpp"
#include "../cpu/logit_rows.cpp"
#include "../cpu/order.cpp"
#include "../cpu/values.cpp"
