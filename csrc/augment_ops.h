// SPDX-License-Identifier: BSD-3-Clause
// What the ops of augmentation share; in augment.cpp.
#pragma once

#include <ATen/core/Tensor.h>

#include "augment.h"
#include "augment_program.h"

namespace torch_renaissance {

void check_images(const char* op, const at::Tensor& images, const Augmentation& a);

// A dense vector of int64 beside the images.
void check_vector(const char* op, const char* name, const at::Tensor& t, const at::Tensor& images);

// On a CPU. On a GPU it would need to wait; there a bad index gives a sample of NaN.
void check_indices(const char* op, const Augment& job, const Cursor& cursor);

at::Tensor empty_batch(const AugmentProgram& p, c10::SymInt n, const at::Tensor& images);

Augment describe_augment(const AugmentProgram& p, const at::Tensor& images, const at::Tensor& out);

void launch_augment(const Augment& job, const at::Tensor& images);

}  // namespace torch_renaissance
