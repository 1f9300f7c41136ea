// SPDX-License-Identifier: BSD-3-Clause
// Autocast's switches, as ATen/autocast_mode.h declares them: it includes all of ATen, which takes
// ten seconds to compile.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>
#include <c10/macros/Export.h>

namespace at::autocast {

TORCH_API bool is_autocast_enabled(c10::DeviceType device_type);
TORCH_API c10::ScalarType get_autocast_dtype(c10::DeviceType device_type);
TORCH_API bool is_autocast_cache_enabled();

}  // namespace at::autocast
