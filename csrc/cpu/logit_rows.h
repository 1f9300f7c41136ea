// SPDX-License-Identifier: BSD-3-Clause
// The cross entropy's loops over logits: along a row of many classes, or over a tile of kTile rows
// side by side, value of class n and row r at [n * kTile + r].
#pragma once

#include "../math/cross_entropy.h"
#include "values.h"

namespace torch_renaissance {

inline constexpr int64_t kTile = 16;

// `weight` is one a class, or null; the weighted sums are made only if `smooth`.
RowSums<float> sum_row(const float* x, const float* weight, bool smooth, int64_t n_classes);
RowSums<double> sum_row(const double* x, const double* weight, bool smooth, int64_t n_classes);
void sum_tile(RowSums<float>* rows,
              const float* x,
              const float* weight,
              bool smooth,
              int64_t n_classes);
void sum_tile(RowSums<double>* rows,
              const double* x,
              const double* weight,
              bool smooth,
              int64_t n_classes);

// The gradient, but for what the target's class has less.
void write_row(float* grad,
               const float* x,
               const RowGradient<float>& row,
               const float* weight,
               int64_t n_classes);
void write_row(double* grad,
               const double* x,
               const RowGradient<double>& row,
               const double* weight,
               int64_t n_classes);
void write_tile(float* grad,
                const float* x,
                const RowGradient<float>* rows,
                const float* weight,
                int64_t n_classes);
void write_tile(double* grad,
                const double* x,
                const RowGradient<double>* rows,
                const double* weight,
                int64_t n_classes);

}  // namespace torch_renaissance
