// SPDX-License-Identifier: BSD-3-Clause
// The loops of logit_rows.h, for the vector units of the processor at hand.
#include "logit_rows.h"

#include <algorithm>
#include <cmath>

namespace torch_renaissance {
namespace {

// Values side by side, each with sums of its own: loops over them are vectorised, and the order of
// every sum stays as it is. Sums are double: one by one, many equal terms collect their roundings.
template <typename T>
constexpr int kLanes = 64 / sizeof(T);

template <typename T>
TR_INLINE T add_lanes(const double (&lane)[kLanes<T>]) {
  double sum = 0;
  for (int j = 0; j < kLanes<T>; ++j) sum += lane[j];
  return static_cast<T>(sum);
}

template <typename T>
TR_INLINE T largest(const T* __restrict__ x, int64_t n) {
  T lane[kLanes<T>];
  std::fill(lane, lane + kLanes<T>, -T(INFINITY));
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) {
    for (int j = 0; j < kLanes<T>; ++j) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
  }
  for (int j = 0; i < n; ++i, ++j) lane[j] = x[i] > lane[j] ? x[i] : lane[j];
  return *std::max_element(lane, lane + kLanes<T>);
}

template <typename T>
TR_INLINE RowSums<T> sum_along(const T* __restrict__ x,
                               const T* __restrict__ weight,
                               bool smooth,
                               int64_t n) {
  auto row = RowSums<T>::empty();
  row.raise_max(largest(x, n));
  const T reference = RowSums<T>::reference(row.max);
  double sum[kLanes<T>] = {}, of_weight[kLanes<T>] = {}, weighted[kLanes<T>] = {};
  int64_t i = 0;
  for (; i + kLanes<T> <= n; i += kLanes<T>) {
    for (int j = 0; j < kLanes<T>; ++j) sum[j] += exponential(x[i + j] - reference);
  }
  for (int j = 0; i < n; ++i, ++j) sum[j] += exponential(x[i] - reference);
  row.sum = add_lanes<T>(sum);
  if (!smooth) return row;
  auto add = [&](int64_t i, int j) {
    const T w = weight != nullptr ? weight[i] : T(1);
    of_weight[j] += w;
    weighted[j] += w * (x[i] - reference);
  };
  for (i = 0; i + kLanes<T> <= n; i += kLanes<T>) {
    for (int j = 0; j < kLanes<T>; ++j) add(i + j, j);
  }
  for (int j = 0; i < n; ++i, ++j) add(i, j);
  row.weight = add_lanes<T>(of_weight);
  row.weighted = add_lanes<T>(weighted);
  return row;
}

template <typename T>
TR_INLINE void sum_across(RowSums<T>* rows,
                          const T* __restrict__ x,
                          const T* __restrict__ weight,
                          bool smooth,
                          int64_t n_classes) {
  T max[kTile], reference[kTile];
  double sum[kTile] = {}, weighted[kTile] = {}, of_weight = 0;
  std::fill(max, max + kTile, -T(INFINITY));
  for (int64_t n = 0; n < n_classes; ++n) {
    for (int r = 0; r < kTile; ++r) max[r] = x[n * kTile + r] > max[r] ? x[n * kTile + r] : max[r];
  }
  for (int r = 0; r < kTile; ++r) reference[r] = RowSums<T>::reference(max[r]);
  for (int64_t n = 0; n < n_classes; ++n) {
    for (int r = 0; r < kTile; ++r) sum[r] += exponential(x[n * kTile + r] - reference[r]);
  }
  for (int64_t n = 0; smooth && n < n_classes; ++n) {
    const T w = weight != nullptr ? weight[n] : T(1);
    of_weight += w;
    for (int r = 0; r < kTile; ++r) weighted[r] += w * (x[n * kTile + r] - reference[r]);
  }
  for (int r = 0; r < kTile; ++r) {
    rows[r] = {
        max[r], static_cast<T>(sum[r]), static_cast<T>(of_weight), static_cast<T>(weighted[r])};
  }
}

template <typename T>
TR_INLINE void write_along(T* __restrict__ grad,
                           const T* __restrict__ x,
                           const RowGradient<T>& row,
                           const T* __restrict__ weight,
                           int64_t n) {
  if (weight != nullptr && row.uniform != 0) {
    for (int64_t i = 0; i < n; ++i) grad[i] = row.at(x[i], weight[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) grad[i] = row.at(x[i], T(1));
  }
}

template <typename T>
TR_INLINE void write_across(T* __restrict__ grad,
                            const T* __restrict__ x,
                            const RowGradient<T>* rows,
                            const T* __restrict__ weight,
                            int64_t n_classes) {
  T max[kTile], log_sum[kTile], softmax[kTile], uniform[kTile];
  for (int r = 0; r < kTile; ++r) {
    max[r] = rows[r].max;
    log_sum[r] = rows[r].log_sum;
    softmax[r] = rows[r].softmax;
    uniform[r] = rows[r].uniform;
  }
  for (int64_t n = 0; n < n_classes; ++n, x += kTile, grad += kTile) {
    const T w = weight != nullptr ? weight[n] : T(1);
    for (int r = 0; r < kTile; ++r) {
      const RowGradient<T> row{max[r], log_sum[r], softmax[r], uniform[r], T(0)};
      grad[r] = row.at(x[r], w);
    }
  }
}

}  // namespace

// target_clones takes functions, not templates.
#define TR_ROWS(T)                                                                           \
  TR_VECTOR_CLONES RowSums<T> sum_row(                                                       \
      const T* x, const T* weight, bool smooth, int64_t n_classes) {                         \
    return sum_along(x, weight, smooth, n_classes);                                          \
  }                                                                                          \
  TR_VECTOR_CLONES void sum_tile(                                                            \
      RowSums<T>* rows, const T* x, const T* weight, bool smooth, int64_t n_classes) {       \
    sum_across(rows, x, weight, smooth, n_classes);                                          \
  }                                                                                          \
  TR_VECTOR_CLONES void write_row(                                                           \
      T* grad, const T* x, const RowGradient<T>& row, const T* weight, int64_t n_classes) {  \
    write_along(grad, x, row, weight, n_classes);                                            \
  }                                                                                          \
  TR_VECTOR_CLONES void write_tile(                                                          \
      T* grad, const T* x, const RowGradient<T>* rows, const T* weight, int64_t n_classes) { \
    write_across(grad, x, rows, weight, n_classes);                                          \
  }
TR_ROWS(float)
TR_ROWS(double)

}  // namespace torch_renaissance
