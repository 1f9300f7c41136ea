// SPDX-License-Identifier: BSD-3-Clause
// Rows of logits among a block's threads: who reads, sums up and writes which classes. By where a
// row's classes lie and how many they are: FewClasses, WarpPerRow, BlockPerRow, Apart.
#pragma once

#include "../math/cross_entropy.h"
#include "cross_entropy.h"
#include "update.cuh"

namespace torch_renaissance {

constexpr unsigned kWholeWarp = 0xffffffff;

template <bool SMOOTH, int LANES, typename T>
__device__ __forceinline__ void merge_lanes(RowSums<T>& sums) {
#pragma unroll
  for (int offset = LANES / 2; offset > 0; offset /= 2) {
    RowSums<T> other = RowSums<T>::empty();
    other.max = __shfl_xor_sync(kWholeWarp, sums.max, offset);
    other.sum = __shfl_xor_sync(kWholeWarp, sums.sum, offset);
    if (SMOOTH) {
      other.weight = __shfl_xor_sync(kWholeWarp, sums.weight, offset);
      other.weighted = __shfl_xor_sync(kWholeWarp, sums.weighted, offset);
    }
    sums.merge(other);
  }
}

// Adds `valid` of N logits; those beyond are -inf. class_of(k) is the k-th one's class.
template <bool SMOOTH, int N, typename scalar_t, typename T, typename ClassOf>
__device__ __forceinline__ void add_logits(RowSums<T>& sums,
                                           const scalar_t (&logits)[N],
                                           int valid,
                                           const T* weight,
                                           ClassOf class_of) {
  T x[N], max = sums.max, sum = 0;
#pragma unroll
  for (int k = 0; k < N; ++k) {
    x[k] = static_cast<T>(logits[k]);
    max = std::fmax(max, x[k]);
  }
  sums.raise_max(max);
  const T reference = RowSums<T>::reference(sums.max);
#pragma unroll
  for (int k = 0; k < N; ++k) {
    x[k] -= reference;
    sum += exponential_of<scalar_t>(x[k]);
  }
  sums.sum += sum;
  if constexpr (SMOOTH) {
#pragma unroll
    for (int k = 0; k < N; ++k) {
      if (k >= valid) continue;
      const T w = weight != nullptr ? weight[class_of(k)] : T(1);
      sums.weight += w;
      sums.weighted = std::fma(w, x[k], sums.weighted);
    }
  }
}

// A row that lies together: `head` values up to a 16-byte boundary, vectors, and a tail.
template <typename scalar_t>
struct Span {
  static constexpr int kSize = Vector<scalar_t>::kSize;
  int head, vectors, count;

  __device__ Span(const scalar_t* row, int count) : count(count) {
    const auto address = static_cast<int>(reinterpret_cast<uintptr_t>(row) & 15);
    head = min(count, (16 - address) % 16 / static_cast<int>(sizeof(scalar_t)));
    vectors = (count - head) / kSize;
  }
  __device__ int ends() const { return count - vectors * kSize; }
  __device__ int end(int i) const { return i < head ? i : i + vectors * kSize; }
  __device__ int first(int vector) const { return head + vector * kSize; }
};

template <typename scalar_t>
__device__ __forceinline__ Vector<scalar_t> unpack(const uint4& raw) {
  Vector<scalar_t> v;
  memcpy(&v, &raw, sizeof(v));
  return v;
}

// Each kind below has kThreads in a block, kGroup of them for a row; `row` and `lane` are a
// thread's place. `read` adds up what the thread reads of its row, `combine` what the row's threads
// have; `write` writes the thread's part of the gradient, blockIdx.y dividing a row's classes.
// kSkips: an ignored row isn't read, at the price of waiting for its label first.

// Few classes, in memory one after another: four threads a row, all values of a row at once.
struct FewClasses {
  static constexpr int kThreads = 1024, kBlocks = 1, kGroup = 4, kEach = 8;
  static constexpr int kMost = kGroup * kEach;
  static constexpr bool kSkips = false;

  static __device__ int row() { return threadIdx.x / kGroup; }
  static __device__ int lane() { return threadIdx.x % kGroup; }

  template <bool SMOOTH, typename scalar_t, typename T>
  static __device__ void read(RowSums<T>& sums, const CrossEntropy& c, const scalar_t* row) {
    const auto n = static_cast<int>(c.n_classes);
    const int valid = (n - lane() + kGroup - 1) / kGroup;
    scalar_t x[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      x[k] = k < valid ? row[lane() + k * kGroup] : scalar_t(-INFINITY);
    }
    add_logits<SMOOTH>(
        sums, x, valid, static_cast<const T*>(c.weight), [](int k) { return lane() + k * kGroup; });
  }

  template <typename Writer, typename scalar_t>
  static __device__ void write(const CrossEntropy& c,
                               int64_t row,
                               const scalar_t* x,
                               scalar_t* grad) {
    scalar_t value[kEach];
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int n = lane() + k * kGroup;
      if (n < c.n_classes) value[k] = x[n];
    }
    const auto writer = Writer::of(c, row);
#pragma unroll
    for (int k = 0; k < kEach; ++k) {
      const int n = lane() + k * kGroup;
      if (n < c.n_classes) grad[n] = writer.one(value[k], n);
    }
  }

  template <bool SMOOTH, typename T>
  static __device__ void combine(RowSums<T>& sums) {
    merge_lanes<SMOOTH, kGroup>(sums);
  }
};

// A warp a row, or a whole block.
template <int THREADS, int GROUP, int UNROLL, int BLOCKS, bool SKIPS>
struct Together {
  static constexpr int kThreads = THREADS, kGroup = GROUP, kUnroll = UNROLL;
  static constexpr int kBlocks = BLOCKS;  // that fit a multiprocessor, at least
  static constexpr bool kSkips = SKIPS;

  static __device__ int row() { return threadIdx.x / kGroup; }
  static __device__ int lane() { return threadIdx.x % kGroup; }

  template <bool SMOOTH, typename scalar_t, typename T>
  static __device__ void read(RowSums<T>& sums, const CrossEntropy& c, const scalar_t* row) {
    using V = Vector<scalar_t>;
    const Span<scalar_t> span(row, static_cast<int>(c.n_classes));
    const auto vectors = reinterpret_cast<const uint4*>(row + span.head);
    const auto weight = static_cast<const T*>(c.weight);
#pragma unroll 1
    for (int i = lane(); i < span.vectors; i += kGroup * kUnroll) {
      uint4 raw[kUnroll];  // as V, values would be unpacked into twice the registers at once
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kGroup < span.vectors) raw[u] = vectors[i + u * kGroup];
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kGroup >= span.vectors) break;
        const int first = span.first(i + u * kGroup);
        const V v = unpack<scalar_t>(raw[u]);
        add_logits<SMOOTH>(sums, v.value, V::kSize, weight, [first](int k) { return first + k; });
      }
    }
    for (int i = lane(); i < span.ends(); i += kGroup) {
      const int n = span.end(i);
      const scalar_t x[1] = {row[n]};
      add_logits<SMOOTH>(sums, x, 1, weight, [n](int) { return n; });
    }
  }

  template <typename Writer, typename scalar_t>
  static __device__ void write(const CrossEntropy& c,
                               int64_t row,
                               const scalar_t* x,
                               scalar_t* grad) {
    using V = Vector<scalar_t>;
    const auto n_classes = static_cast<int>(c.n_classes);
    Span<scalar_t> span(grad, n_classes);
    if (span.head != Span<scalar_t>(x, n_classes).head) span.head = n_classes, span.vectors = 0;
    const auto from = reinterpret_cast<const uint4*>(x + span.head);
    const auto to = reinterpret_cast<V*>(grad + span.head);
    const int begin = blockIdx.y * kGroup * kUnroll + lane();
    uint4 raw[kUnroll];
    auto load = [&](int i) {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kGroup < span.vectors) raw[u] = from[i + u * kGroup];
      }
    };
    if (!kSkips) load(begin);
    const auto writer = Writer::of(c, row);
#pragma unroll 1
    for (int i = begin; i < span.vectors; i += gridDim.y * kGroup * kUnroll) {
      if (kSkips ? !writer.constant : i != begin) load(i);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kGroup >= span.vectors) break;
        V v = unpack<scalar_t>(raw[u]);
        writer.vector(v, span.first(i + u * kGroup));
        to[i + u * kGroup] = v;
      }
    }
    for (int i = blockIdx.y * kGroup + lane(); i < span.ends(); i += gridDim.y * kGroup) {
      const int n = span.end(i);
      grad[n] = writer.one(x[n], n);
    }
  }

  template <bool SMOOTH, typename T>
  static __device__ void combine(RowSums<T>& sums) {
    merge_lanes<SMOOTH, 32>(sums);
    if constexpr (kGroup > 32) {
      constexpr int WARPS = kGroup / 32;
      __shared__ RowSums<T> of_warp[WARPS];
      __syncthreads();  // nobody reads the last row's
      if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sums;
      __syncthreads();
      sums = of_warp[threadIdx.x % WARPS];
      merge_lanes<SMOOTH, WARPS>(sums);
    }
  }
};
using WarpPerRow = Together<128, 32, 8, 4, false>;
using BlockPerRow = Together<256, 256, 4, 4, true>;

// Classes apart in memory, as of images (N, C, H, W): neighbouring threads have neighbouring rows.
// With many classes several threads share a row.
template <int GROUP>
struct Apart {
  static constexpr int kThreads = 256, kBlocks = 4, kGroup = GROUP, kEach = 4, kRun = 32;
  static constexpr int kRows = kThreads / kGroup;
  static constexpr bool kSkips = false;

  static __device__ int row() { return threadIdx.x % kRows; }
  static __device__ int lane() { return threadIdx.x / kRows; }

  template <bool SMOOTH, typename scalar_t, typename T>
  static __device__ void read(RowSums<T>& sums, const CrossEntropy& c, const scalar_t* row) {
    const auto n = static_cast<int>(c.n_classes);
#pragma unroll 1
    for (int first = lane(); first < n; first += kGroup * kEach) {
      const int valid = (n - first + kGroup - 1) / kGroup;
      scalar_t x[kEach];
#pragma unroll
      for (int k = 0; k < kEach; ++k) {
        x[k] =
            k < valid ? row[(first + k * kGroup) * c.input_strides.n_class] : scalar_t(-INFINITY);
      }
      add_logits<SMOOTH>(sums, x, valid, static_cast<const T*>(c.weight), [first](int k) {
        return first + k * kGroup;
      });
    }
  }

  template <typename Writer, typename scalar_t>
  static __device__ void write(const CrossEntropy& c,
                               int64_t row,
                               const scalar_t* x,
                               scalar_t* grad) {
    static_assert(kGroup == 1, "a thread writes all of its run");
    const auto writer = Writer::of(c, row);
    const auto n_classes = static_cast<int>(c.n_classes);
    for (int first = blockIdx.y * kRun; first < n_classes; first += gridDim.y * kRun) {
      const int last = min(first + kRun, n_classes);
#pragma unroll 4
      for (int n = first; n < last; ++n) {
        grad[n * c.grad_strides.n_class] = writer.one(x[n * c.input_strides.n_class], n);
      }
    }
  }

  template <bool SMOOTH, typename T>
  static __device__ void combine(RowSums<T>& sums) {
    if constexpr (kGroup > 1) {
      __shared__ RowSums<T> of_thread[kThreads];
      __syncthreads();  // nobody reads the last rows'
      of_thread[threadIdx.x] = sums;
      __syncthreads();
      for (int i = 1; i < kGroup && lane() == 0; ++i) sums.merge(of_thread[i * kRows + row()]);
    }
  }
};

}  // namespace torch_renaissance
