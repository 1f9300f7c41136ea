// SPDX-License-Identifier: BSD-3-Clause
// The CPU's side of what csrc/cuda/launch.h lists.
#pragma once

#include "../update.h"

namespace torch_renaissance {

void update_cpu(const Update& u);
void norm_cpu(const Norm& n);
void lars_norms_cpu(const Norm& n);
void pack_cpu(const Pack& p);

}  // namespace torch_renaissance
