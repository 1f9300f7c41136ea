// SPDX-License-Identifier: BSD-3-Clause
// The cross entropy on the CPU: rows to and from memory, parallel over rows; a row of many classes
// alone, others a tile at a time.
#include "../cross_entropy.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <type_traits>
#include <vector>

#include "logit_rows.h"

namespace torch_renaissance {
namespace {

constexpr int64_t kGrain = 32768;      // elements worth a thread, as in torch's own loops
constexpr int64_t kManyClasses = 128;  // as many fill a vector along the row

// Values one after another, as T.
template <typename scalar_t, typename T>
void load(T* to, const memory_t<scalar_t>* from, int64_t n) {
  if constexpr (std::is_same_v<scalar_t, T>) {
    std::copy_n(from, n, to);
  } else if constexpr (std::is_same_v<scalar_t, c10::Half>) {
    load_half(to, from, n);
  } else {
    load_bfloat16(to, from, n);
  }
}

template <typename scalar_t, typename T>
void save(memory_t<scalar_t>* to, const T* from, int64_t n) {
  if constexpr (std::is_same_v<scalar_t, T>) {
    std::copy_n(from, n, to);
  } else if constexpr (std::is_same_v<scalar_t, c10::Half>) {
    save_half(to, from, n);
  } else {
    save_bfloat16(to, from, n);
  }
}

int64_t offset_of(const CrossEntropy& c, const LogitStrides& strides, int64_t row) {
  return row / c.n_positions * strides.sample + row % c.n_positions * strides.position;
}

// Whether rows are taken alone: otherwise by tiles.
bool alone(const CrossEntropy& c) {
  return c.input_strides.n_class == 1 && c.n_classes >= kManyClasses;
}

// A buffer for logits or their gradient, and where its rows are in memory.
template <typename scalar_t>
struct Rows {
  using T = opmath_t<scalar_t>;
  using M = memory_t<scalar_t>;

  const CrossEntropy& c;
  const LogitStrides& strides;
  M* memory;
  std::vector<T> buffer;
  int64_t offsets[kTile] = {};
  int64_t count = 0;
  bool together = false;  // a class of all rows of a full tile

  Rows(const CrossEntropy& c, const LogitStrides& strides, const void* memory)
      : c(c), strides(strides), memory(const_cast<M*>(static_cast<const M*>(memory))) {}

  void set(int64_t first, int64_t n_rows) {
    count = n_rows;
    together = count == kTile;
    for (int64_t r = 0; r < count; ++r) {
      offsets[r] = offset_of(c, strides, first + r);
      together = together && offsets[r] == offsets[0] + r;
    }
  }

  // A row alone can be used where it is.
  bool in_place() const { return std::is_same_v<M, T> && alone(c) && strides.n_class == 1; }

  T* data() {
    if constexpr (std::is_same_v<M, T>) {
      if (in_place()) return memory + offsets[0];
    }
    buffer.resize(c.n_classes * (alone(c) ? 1 : kTile));
    return buffer.data();
  }

  T* load() {
    T* to = data();
    if (in_place()) return to;
    if (alone(c)) {
      torch_renaissance::load<scalar_t>(to, memory + offsets[0], c.n_classes);
      return to;
    }
    for (int64_t n = 0; n < c.n_classes; ++n, to += kTile) {
      const M* from = memory + n * strides.n_class;
      if (together) {
        torch_renaissance::load<scalar_t>(to, from + offsets[0], kTile);
      } else {
        for (int64_t r = 0; r < count; ++r) to[r] = Memory<scalar_t>::load(from[offsets[r]]);
      }
    }
    return buffer.data();
  }

  void save() {
    if (in_place()) return;
    const T* from = buffer.data();
    if (alone(c) && strides.n_class == 1) {
      torch_renaissance::save<scalar_t>(memory + offsets[0], from, c.n_classes);
      return;
    }
    const int64_t step = alone(c) ? 1 : kTile;
    for (int64_t n = 0; n < c.n_classes; ++n, from += step) {
      M* to = memory + n * strides.n_class;
      if (together) {
        torch_renaissance::save<scalar_t>(to + offsets[0], from, kTile);
      } else {
        for (int64_t r = 0; r < count; ++r) to[offsets[r]] = Memory<scalar_t>::save(from[r]);
      }
    }
  }
};

// Calls f(first row, number of rows), where `make` makes an f for each thread.
template <typename Make>
void for_tiles(const CrossEntropy& c, Make&& make) {
  const int64_t tile = alone(c) ? 1 : kTile, tiles = (c.n_rows + tile - 1) / tile;
  const int64_t grain = std::max<int64_t>(1, kGrain / std::max<int64_t>(1, tile * c.n_classes));
  at::parallel_for(0, tiles, grain, [&](int64_t begin, int64_t end) {
    auto f = make();
    for (int64_t i = begin; i < end; ++i) f(i * tile, std::min(tile, c.n_rows - i * tile));
  });
}

template <typename T>
Shares<T> shares_of(const CrossEntropy& c) {
  return {static_cast<T>(c.target_share), static_cast<T>(c.uniform_share)};
}

bool is_valid(const CrossEntropy& c, int64_t row) {
  return classify(c.target[row], c.ignore_index, c.n_classes) == Label::kValid;
}

template <typename T>
T weight_of(const CrossEntropy& c, int64_t n) {
  return c.weight != nullptr ? static_cast<const T*>(c.weight)[n] : T(1);
}

template <typename scalar_t>
void store_loss(const CrossEntropy& c, int64_t i, double loss) {
  using T = opmath_t<scalar_t>;
  if (c.wide_loss) {
    static_cast<T*>(c.loss)[i] = static_cast<T>(loss);
  } else {
    static_cast<memory_t<scalar_t>*>(c.loss)[i] = Memory<scalar_t>::save(static_cast<T>(loss));
  }
}

template <typename scalar_t>
opmath_t<scalar_t> grad_loss_of(const CrossEntropy& c, int64_t row) {
  const int64_t i = row * c.grad_loss_stride;
  if (c.wide_loss) return static_cast<const opmath_t<scalar_t>*>(c.grad_loss)[i];
  return Memory<scalar_t>::load(static_cast<const memory_t<scalar_t>*>(c.grad_loss)[i]);
}

template <typename scalar_t>
void forward(const CrossEntropy& c) {
  using T = opmath_t<scalar_t>;
  const auto weight = static_cast<const T*>(c.weight);
  const auto saved = static_cast<T*>(c.saved);
  const bool smooth = c.uniform_share != 0;
  const int64_t step = alone(c) ? 1 : kTile;
  std::vector<T> losses(c.n_rows);
  for_tiles(c, [&] {
    return [&, logits = Rows<scalar_t>(c, c.input_strides, c.input)](int64_t first,
                                                                     int64_t count) mutable {
      if (alone(c) && !is_valid(c, first)) {
        saved[2 * first] = saved[2 * first + 1] = 0;
        return;
      }
      logits.set(first, count);
      const T* x = logits.load();
      RowSums<T> sums[kTile];
      if (alone(c)) {
        sums[0] = sum_row(x, weight, smooth, c.n_classes);
      } else {
        sum_tile(sums, x, weight, smooth, c.n_classes);
      }
      for (int64_t r = 0; r < count; ++r) {
        const int64_t row = first + r, target = c.target[row];
        T* stats = saved + 2 * row;
        stats[0] = stats[1] = 0;
        if (!is_valid(c, row)) continue;
        stats[0] = sums[r].max;
        stats[1] = std::log(sums[r].sum);
        losses[row] = row_loss(
            sums[r], stats[1], x[target * step + r], weight_of<T>(c, target), shares_of<T>(c));
      }
    };
  });
  double total = 0, divisor = 0, total_weight = static_cast<double>(c.n_classes);
  for (int64_t row = 0; row < c.n_rows; ++row) {
    if (c.reduction == Reduction::kNone) store_loss<scalar_t>(c, row, losses[row]);
    if (!is_valid(c, row)) continue;
    total += losses[row];
    divisor += weight_of<T>(c, c.target[row]);
  }
  if (weight != nullptr) total_weight = std::accumulate(weight, weight + c.n_classes, 0.0);
  saved[2 * c.n_rows] = c.reduction == Reduction::kNone ? T(1) : static_cast<T>(divisor);
  saved[2 * c.n_rows + 1] = static_cast<T>(total_weight);
  if (c.reduction == Reduction::kMean) total /= divisor;
  if (c.reduction != Reduction::kNone) store_loss<scalar_t>(c, 0, total);
}

template <typename scalar_t>
void backward(const CrossEntropy& c) {
  using T = opmath_t<scalar_t>;
  const auto weight = static_cast<const T*>(c.weight);
  const auto saved = static_cast<const T*>(c.saved);
  const T divisor = saved[2 * c.n_rows], total_weight = saved[2 * c.n_rows + 1];
  const int64_t step = alone(c) ? 1 : kTile;
  for_tiles(c, [&] {
    return [&,
            logits = Rows<scalar_t>(c, c.input_strides, c.input),
            gradient = Rows<scalar_t>(c, c.grad_strides, c.grad)](int64_t first,
                                                                  int64_t count) mutable {
      RowGradient<T> rows[kTile] = {};
      for (int64_t r = 0; r < count; ++r) {
        const int64_t row = first + r;
        if (!is_valid(c, row)) continue;
        T scale = grad_loss_of<scalar_t>(c, row);
        if (c.reduction == Reduction::kMean) scale = scale / divisor;
        rows[r] = RowGradient<T>::of(saved[2 * row],
                                     saved[2 * row + 1],
                                     scale,
                                     weight_of<T>(c, c.target[row]),
                                     total_weight,
                                     shares_of<T>(c));
      }
      logits.set(first, count);
      gradient.set(first, count);
      T* grad = gradient.data();
      if (!alone(c)) {
        write_tile(grad, logits.load(), rows, weight, c.n_classes);
      } else if (is_valid(c, first)) {
        write_row(grad, logits.load(), rows[0], weight, c.n_classes);
      }
      for (int64_t r = 0; r < count; ++r) {
        if (is_valid(c, first + r)) {
          grad[c.target[first + r] * step + r] -= rows[r].target;
        } else {
          for (int64_t n = 0; n < c.n_classes; ++n) grad[n * step + r] = 0;
        }
      }
      gradient.save();
    };
  });
}

template <typename F>
void for_dtype(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::kFloat:
      return f(float{});
    case ScalarType::kDouble:
      return f(double{});
    case ScalarType::kHalf:
      return f(c10::Half{});
    case ScalarType::kBFloat16:
      return f(c10::BFloat16{});
  }
}

const bool cross_entropy_registered = [] {
  cpu_cross_entropy.forward = [](const CrossEntropy& c, const at::Tensor&) {
    for_dtype(c.dtype, [&](auto scalar) { forward<decltype(scalar)>(c); });
  };
  cpu_cross_entropy.backward = [](const CrossEntropy& c, const at::Tensor&) {
    for_dtype(c.dtype, [&](auto scalar) { backward<decltype(scalar)>(c); });
  };
  cpu_cross_entropy.can_wait = [] { return true; };
  return true;
}();

}  // namespace
}  // namespace torch_renaissance
