// SPDX-License-Identifier: BSD-3-Clause
// Sums of columns, in a launch of their own or in that of GELU's backward.
#include "columns.h"

#include "../math/gelu.h"
#include "column_sums.cuh"

namespace torch_renaissance {
namespace {

template <bool TANH>
__device__ __forceinline__ Gelu gelu_of(float x) {
  return TANH ? gelu_tanh(x) : gelu(x);
}

template <typename scalar_t>
__global__ void __launch_bounds__(kNormThreads, 2)
    column_sums_kernel(const __grid_constant__ Columns c,
                       const NormTiling t,
                       const NormScratch scratch) {
  __shared__ NormShared shared;
  constexpr int ROWS = 2 * kNormRows;
  const auto p = NormPlace::of(t, c.rows, c.channels);
  float sums[kNormVector] = {};
#pragma unroll 1
  for (int64_t r = p.first + p.lane; r < p.last; r += ROWS * p.lanes) {
    NormBits bits[ROWS];
    for_rows<ROWS>(p, r, p.lanes, c.channels, [&](int u, int64_t place) {
      bits[u] = read_bits<scalar_t>(c.input, place);
    });
    for_rows<ROWS>(
        p, r, p.lanes, c.channels, [&](int u, int64_t) { add_to<scalar_t>(sums, bits[u]); });
  }
  write_sums<scalar_t>(c.sums, c.float_sums, c.channels, t, scratch, p, sums, shared);
}

template <typename scalar_t, bool TANH>
__global__ void __launch_bounds__(kNormThreads, 3)
    gelu_kernel(const __grid_constant__ Columns c, const NormTiling t) {
  const auto p = NormPlace::of(t, c.rows, c.channels);
  if (p.first + p.lane >= p.last) return;
  float bias[kNormVector];
  unpack<scalar_t>(read_bits<scalar_t>(c.bias, p.channel), bias);
#pragma unroll 1
  for (int64_t r = p.first + p.lane; r < p.last; r += kNormRows * p.lanes) {
    NormBits bits[kNormRows];
    for_rows<kNormRows>(p, r, p.lanes, c.channels, [&](int u, int64_t place) {
      bits[u] = read_bits<scalar_t>(c.input, place);
    });
    for_rows<kNormRows>(p, r, p.lanes, c.channels, [&](int u, int64_t place) {
      float x[kNormVector];
      unpack<scalar_t>(bits[u], x);
#pragma unroll
      for (int k = 0; k < kNormVector; ++k) {
        x[k] = gelu_of<TANH>(rounded<scalar_t>(x[k] + bias[k])).value;
      }
      write_bits<scalar_t>(c.output, place, pack<scalar_t>(x));
    });
  }
}

template <typename scalar_t, bool TANH>
__global__ void __launch_bounds__(kNormThreads, 2)
    gelu_backward_kernel(const __grid_constant__ Columns c,
                         const NormTiling t,
                         const NormScratch scratch) {
  __shared__ NormShared shared;
  const auto p = NormPlace::of(t, c.rows, c.channels);
  float sums[kNormVector] = {}, bias[kNormVector] = {};
  if (p.first + p.lane < p.last) {
    unpack<scalar_t>(read_bits<scalar_t>(c.bias, p.channel), bias);
  }
#pragma unroll 1
  for (int64_t r = p.first + p.lane; r < p.last; r += kNormRows * p.lanes) {
    NormBits inputs[kNormRows], grads[kNormRows];
    for_rows<kNormRows>(p, r, p.lanes, c.channels, [&](int u, int64_t place) {
      inputs[u] = read_bits<scalar_t>(c.input, place);
      grads[u] = read_bits<scalar_t>(c.grad, place);
    });
    for_rows<kNormRows>(p, r, p.lanes, c.channels, [&](int u, int64_t place) {
      float x[kNormVector], grad[kNormVector];
      unpack<scalar_t>(inputs[u], x);
      unpack<scalar_t>(grads[u], grad);
#pragma unroll
      for (int k = 0; k < kNormVector; ++k) {
        grad[k] *= gelu_of<TANH>(rounded<scalar_t>(x[k] + bias[k])).derivative;
      }
      const NormBits bits = pack<scalar_t>(grad);
      write_bits<scalar_t>(c.output, place, bits);
      add_to<scalar_t>(sums, bits);
    });
  }
  write_sums<scalar_t>(c.sums, c.float_sums, c.channels, t, scratch, p, sums, shared);
}

template <typename scalar_t, bool TANH>
void launch_gelu(const Columns& c, const NormTiling& t, cudaStream_t stream) {
  gelu_kernel<scalar_t, TANH><<<norm_grid(t), kNormThreads, 0, stream>>>(c, t);
}

template <typename scalar_t, bool TANH>
void launch_backward(const Columns& c,
                     const NormTiling& t,
                     const NormScratch& scratch,
                     cudaStream_t stream) {
  gelu_backward_kernel<scalar_t, TANH><<<norm_grid(t), kNormThreads, 0, stream>>>(c, t, scratch);
}

// Calls f(a number of the matrix' dtype, which form of GELU).
template <typename F>
cudaError_t dispatch(const Columns& c, F&& f) {
  const auto with_form = [&](auto number) {
    return c.tanh ? f(number, std::true_type()) : f(number, std::false_type());
  };
  c.bfloat16 ? with_form(__nv_bfloat16()) : with_form(__half());
  return cudaGetLastError();
}

}  // namespace

cudaError_t gelu_cuda(const Columns& c, const NormTiling& tiling, cudaStream_t stream) {
  NormTiling wide = widened(tiling, c.rows, c.channels);
  // As short as threads take it, since nothing comes together.
  constexpr int64_t kMostChunks = 65535;
  wide.rows_per_chunk = std::max<int64_t>(kNormRows * (kNormThreads >> wide.log2_vectors),
                                          (c.rows + kMostChunks - 1) / kMostChunks);
  wide.chunks = static_cast<int>((c.rows + wide.rows_per_chunk - 1) / wide.rows_per_chunk);
  return dispatch(c, [&](auto number, auto tanh) {
    launch_gelu<decltype(number), tanh.value>(c, wide, stream);
  });
}

cudaError_t gelu_backward_cuda(const Columns& c,
                               const NormTiling& tiling,
                               const NormScratch& scratch,
                               cudaStream_t stream) {
  return dispatch(c, [&](auto number, auto tanh) {
    launch_backward<decltype(number), tanh.value>(c, tiling, scratch, stream);
  });
}

cudaError_t column_sums_cuda(const Columns& c,
                             const NormTiling& tiling,
                             const NormScratch& scratch,
                             cudaStream_t stream) {
  const auto launch = [&](auto number) {
    column_sums_kernel<decltype(number)>
        <<<norm_grid(tiling), kNormThreads, 0, stream>>>(c, tiling, scratch);
  };
  c.bfloat16 ? launch(__nv_bfloat16()) : launch(__half());
  return cudaGetLastError();
}

}  // namespace torch_renaissance
