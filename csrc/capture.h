// SPDX-License-Identifier: BSD-3-Clause
// Whether the current CUDA stream is being captured; null in a build without CUDA.
#pragma once

namespace torch_renaissance {

inline bool (*is_capturing)() = nullptr;

}  // namespace torch_renaissance
