// SPDX-License-Identifier: BSD-3-Clause
// Chooses how rows are shared among threads, by where a row's classes lie and how many they are.
#include "cross_entropy.cuh"

#include <algorithm>

namespace torch_renaissance {
namespace {

constexpr int64_t kMostBlocks = 8192;  // more rows, and a block takes several
constexpr int64_t kMostGridY = 65535;
constexpr int64_t kWarpClasses = 1024;  // up to here a warp holds a row's logits in registers
constexpr int64_t kOneThreadClasses = 64;

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename P>
int64_t blocks_of(const CrossEntropy& c) {
  const int64_t blocks = divide_up(c.n_rows, P::kThreads / P::kGroup);
  return std::clamp<int64_t>(blocks, 1, kMostBlocks);
}

template <typename F>
auto for_layout(const CrossEntropy& c, F&& f) {
  if (c.input_strides.n_class != 1) {
    return c.n_classes <= kOneThreadClasses ? f(Apart<1>{}) : f(Apart<8>{});
  }
  if (c.n_classes <= FewClasses::kMost) return f(FewClasses{});
  return c.n_classes <= kWarpClasses ? f(WarpPerRow{}) : f(BlockPerRow{});
}

template <typename F>
cudaError_t for_dtype(ScalarType dtype, F&& f) {
  switch (dtype) {
    case ScalarType::kFloat:
      return f(float{});
    case ScalarType::kDouble:
      return f(double{});
    case ScalarType::kHalf:
      return f(__half{});
    case ScalarType::kBFloat16:
      return f(__nv_bfloat16{});
  }
  return cudaErrorInvalidValue;
}

template <typename P, typename scalar_t>
cudaError_t backward(const CrossEntropy& c, int64_t classes_per_block, cudaStream_t stream) {
  const int64_t parts = divide_up(c.n_classes, classes_per_block);
  const dim3 grid(divide_up(c.n_rows, P::kThreads / P::kGroup), std::min(parts, kMostGridY));
  cross_entropy_backward_kernel<P, scalar_t><<<grid, P::kThreads, 0, stream>>>(c);
  return cudaGetLastError();
}

}  // namespace

int64_t cross_entropy_blocks(const CrossEntropy& c) {
  return for_layout(c, [&](auto p) { return blocks_of<decltype(p)>(c); });
}

cudaError_t cross_entropy_forward_cuda(const CrossEntropy& c,
                                       const CrossEntropyScratch& scratch,
                                       cudaStream_t stream) {
  return for_dtype(c.dtype, [&](auto scalar) {
    return for_layout(c, [&](auto p) {
      using scalar_t = decltype(scalar);
      using P = decltype(p);
      const auto kernel = c.uniform_share != 0 ? cross_entropy_forward_kernel<P, true, scalar_t>
                                               : cross_entropy_forward_kernel<P, false, scalar_t>;
      kernel<<<blocks_of<P>(c), P::kThreads, 0, stream>>>(c, scratch);
      return cudaGetLastError();
    });
  });
}

cudaError_t cross_entropy_backward_cuda(const CrossEntropy& c, cudaStream_t stream) {
  if (c.n_rows == 0 || c.n_classes == 0) return cudaSuccess;
  return for_dtype(c.dtype, [&](auto scalar) {
    using scalar_t = decltype(scalar);
    if (c.input_strides.n_class != 1 || c.grad_strides.n_class != 1) {
      return backward<Apart<1>, scalar_t>(c, Apart<1>::kRun, stream);
    }
    if (c.n_classes <= FewClasses::kMost) {
      return backward<FewClasses, scalar_t>(c, c.n_classes, stream);
    }
    if (c.n_classes <= kWarpClasses) return backward<WarpPerRow, scalar_t>(c, c.n_classes, stream);
    using P = BlockPerRow;
    constexpr int64_t kBatch = P::kGroup * P::kUnroll * Vector<scalar_t>::kSize;
    return backward<P, scalar_t>(c, kBatch, stream);
  });
}

}  // namespace torch_renaissance
