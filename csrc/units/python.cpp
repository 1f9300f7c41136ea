// SPDX-License-Identifier: BSD-3-Clause
// Compiled as one: pybind11 and the tensor take longer than these files together.
#include "../bindings.cpp"
#include "../python_objects.cpp"
#include "../watch.cpp"
