// SPDX-License-Identifier: BSD-3-Clause
// The host's side of a step, in Python's terms.
#pragma once

#include <pybind11/pybind11.h>

namespace torch_renaissance {

void bind_host(pybind11::module_& m);

}  // namespace torch_renaissance
