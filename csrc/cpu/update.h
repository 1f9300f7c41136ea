// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include "../update.h"

namespace torch_renaissance {

void update_cpu(const Update& u);
void pack_cpu(const Pack& p);

}  // namespace torch_renaissance
