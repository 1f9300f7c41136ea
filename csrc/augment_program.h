// SPDX-License-Identifier: BSD-3-Clause
// The numbers that tr.data.Program hands to the ops, read and checked.
#pragma once

#include <ATen/core/Tensor.h>

#include "augment.h"

namespace torch_renaissance {

struct AugmentProgram {
  Augmentation augmentation;
  PixelType dtype;
  bool channels_last;
};

// `program`: channels, height and width of a source image; dtype as a PixelType; whether the output
// is channels_last, and sampling nearest; then of each step its fields up to `mode`. `values`:
// fill, scale, bias and what is erased, four channels each; then each step's.
AugmentProgram read_program(const char* op, at::IntArrayRef program, at::ArrayRef<double> values);

at::ScalarType torch_dtype(PixelType dtype);

}  // namespace torch_renaissance
