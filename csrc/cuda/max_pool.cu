// SPDX-License-Identifier: BSD-3-Clause
// Max pooling over channels_last tensors: a thread has eight channels of a pixel, or of a tile of
// pixels, and gathers what belongs there, so that all is written once and in the same order.
#include "max_pool.h"

#include <algorithm>
#include <cstring>

#include "vector.cuh"

namespace torch_renaissance {
namespace {

using PoolValues = Vector<uint32_t>;        // eight 16-bit values, in pairs
using PoolPositions = Vector<uint32_t, 2>;  // eight bytes
static_assert(sizeof(PoolValues) == 2 * kPoolChannels && sizeof(PoolPositions) == kPoolChannels);

template <typename to_t, typename from_t>
__device__ __forceinline__ to_t bits_as(const from_t& from) {
  static_assert(sizeof(to_t) == sizeof(from_t));
  to_t to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename scalar_t>
struct PoolPair;
template <>
struct PoolPair<__half> {
  using type = __half2;
  static constexpr uint32_t kMinusInfinity = 0xfc00fc00;
};
template <>
struct PoolPair<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static constexpr uint32_t kMinusInfinity = 0xff80ff80;
};

// -- Which vector a thread has -------------------------------------------------------------------

// Blocks take lines, each a row of pixels of a sample, and parts of long ones.
struct PoolPlace {
  bool exists;
  int sample, row, column, vector;
};

__device__ __forceinline__ PoolPlace find_place(const MaxPool& p, int rows, int columns) {
  const unsigned vectors = p.n_channels / kPoolChannels;
  const unsigned line = blockIdx.x * blockDim.y + threadIdx.y;
  const unsigned i = blockIdx.y * blockDim.x + threadIdx.x;
  const unsigned sample = line / rows, column = i / vectors;
  return {sample < p.n_samples && column < columns,
          static_cast<int>(sample),
          static_cast<int>(line - sample * rows),
          static_cast<int>(column),
          static_cast<int>(i - column * vectors)};
}

template <typename Kernel>
cudaError_t launch(Kernel* kernel, const MaxPool& p, int rows, int columns, cudaStream_t stream) {
  const auto divide_up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t length = int64_t{columns} * (p.n_channels / kPoolChannels);
  const int64_t parts = divide_up(length, kThreads);
  const int64_t x = divide_up(divide_up(length, parts), 32) * 32, y = kThreads / x;
  const int64_t lines = int64_t{p.n_samples} * rows;
  kernel<<<dim3(divide_up(lines, y), parts), dim3(x, y), 0, stream>>>(p);
  return cudaGetLastError();
}

// Index of the vector in a tensor [samples, rows, columns, channels].
__device__ __forceinline__ int64_t
index_of(const MaxPool& p, const int (&size)[2], const PoolPlace& at, int row, int column) {
  const int64_t line = int64_t{at.sample} * size[0] + row;
  return (line * size[1] + column) * (p.n_channels / kPoolChannels) + at.vector;
}

__device__ __forceinline__ bool within(const int (&size)[2], int row, int column) {
  return row >= 0 && row < size[0] && column >= 0 && column < size[1];
}

// -- Forward -------------------------------------------------------------------------------------

// Of equal values the first stays, of NaNs the last: as torch chooses. Bits are kept, in pairs.
// `exists` is a mask.
template <typename scalar_t>
__device__ __forceinline__ void choose(const PoolValues& values,
                                       uint32_t exists,
                                       uint32_t position,
                                       PoolValues& largest,
                                       PoolValues& positions) {
  using pair_t = typename PoolPair<scalar_t>::type;
#pragma unroll
  for (int j = 0; j < PoolValues::kSize; ++j) {
    const auto value = bits_as<pair_t>(values.value[j]);
    const uint32_t greater = __hgt2_mask(value, bits_as<pair_t>(largest.value[j]));
    const uint32_t chosen = (greater | __hneu2_mask(value, value)) & exists;
    largest.value[j] = (values.value[j] & chosen) | (largest.value[j] & ~chosen);
    positions.value[j] = (position * 0x10001 & chosen) | (positions.value[j] & ~chosen);
  }
}

// kSize: of a square window; 0: any.
template <typename scalar_t, int kSize>
__global__ void __launch_bounds__(kThreads)
    max_pool_forward_kernel(const __grid_constant__ MaxPool p) {
  const PoolPlace at = find_place(p, p.pooled[0], p.pooled[1]);
  if (!at.exists) return;
  const int rows = kSize != 0 ? kSize : p.kernel[0], columns = kSize != 0 ? kSize : p.kernel[1];
  const int top = at.row * p.stride[0] - p.padding[0];
  const int left = at.column * p.stride[1] - p.padding[1];
  const auto input = static_cast<const PoolValues*>(p.input);
  const auto clamp = [&](int d, int i) { return max(0, min(i, p.size[d] - 1)); };

  // -inf isn't greater than -inf: where there is nothing else, it's the first position within.
  constexpr uint32_t kLowest = PoolPair<scalar_t>::kMinusInfinity;
  const uint32_t first = (max(-top, 0) * columns + max(-left, 0)) * 0x10001;
  PoolValues largest{{kLowest, kLowest, kLowest, kLowest}};
  PoolValues positions{{first, first, first, first}};
  constexpr int kAtOnce = kSize != 0 ? kSize : 1;
#pragma unroll(kAtOnce)
  for (int i = 0; i < rows; ++i) {
    const PoolValues* line = input + index_of(p, p.size, at, clamp(0, top + i), 0);
    for (int j = 0; j < columns; j += kAtOnce) {
      PoolValues values[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {  // without a branch, so that many are on their way
        values[k] = line[clamp(1, left + j + k) * (p.n_channels / kPoolChannels)];
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const uint32_t exists = within(p.size, top + i, left + j + k) ? ~0u : 0;
        choose<scalar_t>(values[k], exists, i * columns + j + k, largest, positions);
      }
    }
  }

  const int64_t to = index_of(p, p.pooled, at, at.row, at.column);
  static_cast<PoolValues*>(p.output)[to] = largest;
  if (p.positions == nullptr) return;
  PoolPositions bytes;
#pragma unroll
  for (int j = 0; j < PoolPositions::kSize; ++j) {
    bytes.value[j] = __byte_perm(positions.value[2 * j], positions.value[2 * j + 1], 0x6420);
  }
  reinterpret_cast<PoolPositions*>(p.positions)[to] = bytes;
}

// -- Backward ------------------------------------------------------------------------------------

// What one window has for a pixel: nothing, or some channels' gradient.
template <typename scalar_t>
struct PoolWindow {
  Vector<scalar_t> grad;
  Vector<uint8_t, kPoolChannels> positions;

  __device__ __forceinline__ void load(const MaxPool& p, const PoolPlace& at, int row, int column) {
    const auto clamp = [&](int d, int i) { return max(0, min(i, p.pooled[d] - 1)); };
    const int64_t i = index_of(p, p.pooled, at, clamp(0, row), clamp(1, column));
    grad = static_cast<const Vector<scalar_t>*>(p.grad_output)[i];
    auto bytes = reinterpret_cast<const PoolPositions*>(p.positions)[i];
    const uint32_t nowhere = within(p.pooled, row, column) ? 0 : ~0u;  // all kNoPosition
    for (uint32_t& four : bytes.value) four |= nowhere;
    positions = bits_as<decltype(positions)>(bytes);
  }

  __device__ __forceinline__ void add_to(float (&sums)[kPoolChannels], int position) const {
#pragma unroll
    for (int j = 0; j < kPoolChannels; ++j) {
      if (positions.value[j] == position) sums[j] += static_cast<float>(grad.value[j]);
    }
  }
};

template <typename scalar_t>
__device__ __forceinline__ void store(const MaxPool& p,
                                      const PoolPlace& at,
                                      int row,
                                      int column,
                                      const float (&sums)[kPoolChannels]) {
  Vector<scalar_t> grad;
#pragma unroll
  for (int j = 0; j < kPoolChannels; ++j) grad.value[j] = static_cast<scalar_t>(sums[j]);
  static_cast<Vector<scalar_t>*>(p.grad_input)[index_of(p, p.size, at, row, column)] = grad;
}

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads)
    max_pool_backward_kernel(const __grid_constant__ MaxPool p) {
  const PoolPlace at = find_place(p, p.size[0], p.size[1]);
  if (!at.exists) return;
  // The windows that have the pixel, also those beyond the last one that there is.
  const int row = at.row + p.padding[0], column = at.column + p.padding[1];
  const auto first = [&](int d, int i) {
    return i < p.kernel[d] ? 0 : (i - p.kernel[d]) / p.stride[d] + 1;
  };
  const int last_row = min(row / p.stride[0], p.pooled[0] - 1);
  const int last_column = min(column / p.stride[1], p.pooled[1] - 1);
  float sums[kPoolChannels] = {};
  for (int i = first(0, row); i <= last_row; ++i) {
    for (int j = first(1, column); j <= last_column; ++j) {
      const int position = (row - i * p.stride[0]) * p.kernel[1] + column - j * p.stride[1];
      PoolWindow<scalar_t> window;
      window.load(p, at, i, j);
      window.add_to(sums, position);
    }
  }
  store<scalar_t>(p, at, at.row, at.column, sums);
}

// Tiles of one stride's rows and columns, counted from the padding's edge: tile i has the pixels
// in which window i begins, and they are in no windows but that one and the kWindows - 1 before it.
// So each window is read once for a tile, and all positions are known to the compiler.
template <typename scalar_t, int kSize, int kStride>
__global__ void __launch_bounds__(kThreads)
    max_pool_backward_tiles_kernel(const __grid_constant__ MaxPool p) {
  constexpr int kWindows = (kSize + kStride - 1) / kStride;
  const auto tiles = [&](int d) { return (p.size[d] - 1 + p.padding[d]) / kStride + 1; };
  const PoolPlace at = find_place(p, tiles(0), tiles(1));
  if (!at.exists) return;
  PoolWindow<scalar_t> windows[kWindows][kWindows];
#pragma unroll
  for (int i = 0; i < kWindows; ++i) {
#pragma unroll
    for (int j = 0; j < kWindows; ++j) windows[i][j].load(p, at, at.row - i, at.column - j);
  }
#pragma unroll
  for (int k = 0; k < kStride; ++k) {
#pragma unroll
    for (int l = 0; l < kStride; ++l) {
      float sums[kPoolChannels] = {};
#pragma unroll
      for (int i = kWindows - 1; i >= 0; --i) {  // from the first window, as torch adds
#pragma unroll
        for (int j = kWindows - 1; j >= 0; --j) {
          const int row = i * kStride + k, column = j * kStride + l;
          if (row < kSize && column < kSize) windows[i][j].add_to(sums, row * kSize + column);
        }
      }
      const int row = at.row * kStride + k - p.padding[0];
      const int column = at.column * kStride + l - p.padding[1];
      if (within(p.size, row, column)) store<scalar_t>(p, at, row, column, sums);
    }
  }
}

template <typename scalar_t, int kSize, int kStride>
cudaError_t backward_by_tiles(const MaxPool& p, cudaStream_t stream) {
  const auto tiles = [&](int d) { return (p.size[d] - 1 + p.padding[d]) / kStride + 1; };
  const auto kernel = max_pool_backward_tiles_kernel<scalar_t, kSize, kStride>;
  return launch(kernel, p, tiles(0), tiles(1), stream);
}

// -- Launchers -----------------------------------------------------------------------------------

bool square(const int (&sizes)[2], int size) { return sizes[0] == size && sizes[1] == size; }

template <typename F>
cudaError_t for_pooled_dtype(ScalarType dtype, F&& f) {
  if (dtype == ScalarType::kHalf) return f(__half{});
  if (dtype == ScalarType::kBFloat16) return f(__nv_bfloat16{});
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t max_pool_forward_cuda(const MaxPool& p, cudaStream_t stream) {
  return for_pooled_dtype(p.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    const auto kernel = square(p.kernel, 2)   ? max_pool_forward_kernel<scalar_t, 2>
                        : square(p.kernel, 3) ? max_pool_forward_kernel<scalar_t, 3>
                                              : max_pool_forward_kernel<scalar_t, 0>;
    return launch(kernel, p, p.pooled[0], p.pooled[1], stream);
  });
}

cudaError_t max_pool_backward_cuda(const MaxPool& p, cudaStream_t stream) {
  return for_pooled_dtype(p.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    if (square(p.stride, 2)) {
      if (square(p.kernel, 2)) return backward_by_tiles<scalar_t, 2, 2>(p, stream);
      if (square(p.kernel, 3)) return backward_by_tiles<scalar_t, 3, 2>(p, stream);
    }
    return launch(max_pool_backward_kernel<scalar_t>, p, p.size[0], p.size[1], stream);
  });
}

}  // namespace torch_renaissance
