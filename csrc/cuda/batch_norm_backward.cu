// SPDX-License-Identifier: BSD-3-Clause
// Batch normalisation backward: the gradients of weight and bias, then that of the input; see Note
// [One launch or two].
#include "batch_norm_backward_rows.cuh"
#include "batch_norm_launch.cuh"

namespace torch_renaissance {
namespace {

// -- Two launches ---------------------------------------------------------------------------------

template <typename scalar_t, NormMask MASK>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_sums_kernel(const __grid_constant__ BatchNormBackward n,
                     const NormTiling t,
                     const NormScratch scratch) {
  __shared__ NormShared shared;
  const auto p = NormPlace::of(t, n.rows, n.channels);
  wait_for_previous();
  let_next_come();
  GradSums<scalar_t, MASK> sums(n, p);
  // As many bytes on their way, whatever a row has.
  constexpr int ROWS = MASK == NormMask::kOfResult ? kNormRows / 2 : kNormRows;
#pragma unroll 1
  for (int64_t r = p.first + p.lane; r < p.last; r += ROWS * p.lanes) {
    GradRow rows[ROWS];
    for_rows<ROWS>(p, r, p.lanes, n.channels, [&](int u, int64_t place) {
      rows[u] = GradRow::read<scalar_t, MASK>(n, place);
    });
    for_rows<ROWS>(p, r, p.lanes, n.channels, [&](int u, int64_t place) {
      const NormBits passed = sums.add(n, rows[u]);
      if (MASK == NormMask::kOfResult) write_bits<scalar_t>(n.grad_residual, place, passed);
    });
  }
  const NormSums own = sums.of_block(p, shared);
  if (!is_last_of_tile(t, scratch, {own.grad, own.along}, shared)) return;
  const auto total =
      add_chunks<NormSums>(t, scratch, shared, [](NormSums& all, float2 chunk, int, float2) {
        all.add({chunk.x, chunk.y});
      });
  for_own_channel(t, n.channels, [&](int channel, int) { finish(n, channel, total); });
}

// What has come before the launch that writes: with a residual, its gradient is masked already.
template <NormMask MASK>
constexpr NormMask kMaskLeft = MASK == NormMask::kOfResult ? NormMask::kNone : MASK;

// Writes the gradient of the place's rows, and adds them to `sums`.
template <typename scalar_t, NormMask MASK, bool SUMS>
__device__ __forceinline__ void write_rows(const BatchNormBackward& n,
                                           const NormPlace& p,
                                           float (&sums)[kNormVector]) {
  constexpr NormMask LEFT = kMaskLeft<MASK>;
  const void* of_norm = MASK == NormMask::kOfResult ? n.grad_residual : n.grad;
  if (p.first + p.lane >= p.last) return;
  Normalise norm[kNormVector];
  NormaliseBackward backward[kNormVector];
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) {
    const int c = p.channel + k;
    norm[k] = normalise_of<LEFT>(n, c);
    backward[k] = backward_of(n, c, n.grad_bias[c], n.grad_weight[c]);
  }
#pragma unroll 1
  for (int64_t r = p.last - 1 - p.lane; r >= p.first; r -= kNormRows * p.lanes) {
    NormBits inputs[kNormRows], grads[kNormRows];
    for_rows<kNormRows>(p, r, -p.lanes, n.channels, [&](int u, int64_t place) {
      inputs[u] = read_bits<scalar_t>(n.input, place);
      grads[u] = read_bits<scalar_t>(of_norm, place);
    });
    for_rows<kNormRows>(p, r, -p.lanes, n.channels, [&](int u, int64_t place) {
      float x[kNormVector], grad[kNormVector];
      unpack<scalar_t>(inputs[u], x);
      unpack<scalar_t>(grads[u], grad);
      mask<scalar_t, LEFT>(grad, x, norm, {});
      const NormBits bits = input_grad<scalar_t>(backward, x, grad);
      write_bits<scalar_t>(n.grad_input, place, bits);
      if (!SUMS) return;
      unpack<scalar_t>(bits, grad);
#pragma unroll
      for (int k = 0; k < kNormVector; ++k) sums[k] += grad[k];
    });
  }
}

template <typename scalar_t, NormMask MASK>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_grad_kernel(const __grid_constant__ BatchNormBackward n, const NormTiling t) {
  float unused[kNormVector];
  wait_for_previous();
  write_rows<scalar_t, MASK, false>(n, NormPlace::of(t, n.rows, n.channels), unused);
}

template <typename scalar_t, NormMask MASK>
__global__ void __launch_bounds__(kNormThreads, 2)
    norm_grad_and_bias_kernel(const __grid_constant__ BatchNormBackward n,
                              const NormTiling t,
                              const NormScratch scratch) {
  __shared__ NormShared shared;
  const auto p = NormPlace::of(t, n.rows, n.channels);
  wait_for_previous();
  float sums[kNormVector] = {}, none[kNormVector] = {};
  write_rows<scalar_t, MASK, true>(n, p, sums);
  const float2 own = add_lanes(sums, none, p, shared);
  if (!is_last_of_tile(t, scratch, own, shared)) return;
  const auto total =
      add_chunks<NormSums>(t, scratch, shared, [](NormSums& all, float2 chunk, int, float2) {
        all.add({chunk.x, chunk.y});
      });
  for_own_channel(t, n.channels, [&](int channel, int) {
    static_cast<scalar_t*>(n.grad_input_bias)[channel] = static_cast<scalar_t>(total.grad);
  });
}

// -- One launch -----------------------------------------------------------------------------------

template <typename scalar_t, NormMask MASK>
__global__ void __launch_bounds__(kNormThreads)
    batch_norm_backward_cluster_kernel(const __grid_constant__ BatchNormBackward n,
                                       const NormTiling t) {
#ifdef TR_HAS_CLUSTERS
  __shared__ NormShared shared;
  const auto cluster = cooperative_groups::this_cluster();
  const auto p = NormPlace::of(t, n.rows, n.channels);
  wait_for_previous();
  const int64_t first = p.first + p.lane;
  GradRow rows[kHeldRows];
  for_rows<kHeldRows>(p, first, p.lanes, n.channels, [&](int u, int64_t place) {
    rows[u] = GradRow::read<scalar_t, MASK>(n, place);
  });
  GradSums<scalar_t, MASK> sums(n, p);
  NormaliseBackward backward[kNormVector];
  if (first < p.last) {
#pragma unroll
    for (int k = 0; k < kNormVector; ++k) backward[k] = backward_of(n, p.channel + k, 1, 1);
  }
  float invstd = 0;
  for_own_channel(t, n.channels, [&](int channel, int) { invstd = n.invstd[channel]; });
  for_rows<kHeldRows>(p, first, p.lanes, n.channels, [&](int u, int64_t place) {
    rows[u].grad = sums.add(n, rows[u]);
    if (MASK == NormMask::kOfResult) write_bits<scalar_t>(n.grad_residual, place, rows[u].grad);
  });
  const NormSums own = sums.of_block(p, shared);
  if (threadIdx.x < t.tile_channels()) shared.of_block[threadIdx.x] = {own.grad, own.along};
  cluster.sync();
  NormSums all;
  for_own_channel(t, n.channels, [&](int, int in_tile) {
#pragma unroll 4
    for (int chunk = 0; chunk < t.chunks; ++chunk) {
      const float2 s = cluster.map_shared_rank(shared.of_block, chunk)[in_tile];
      all.add({s.x, s.y});
    }
    shared.first[in_tile] = all.grad;
    shared.second[in_tile] = all.along * invstd;
  });
  cluster.barrier_arrive();
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) {
    backward[k].mean_grad *= shared.first[p.in_tile + k];
    backward[k].along *= shared.second[p.in_tile + k];
  }
  for_rows<kHeldRows>(p, first, p.lanes, n.channels, [&](int u, int64_t place) {
    float x[kNormVector], grad[kNormVector];
    unpack<scalar_t>(rows[u].input, x);
    unpack<scalar_t>(rows[u].grad, grad);
    write_bits<scalar_t>(n.grad_input, place, input_grad<scalar_t>(backward, x, grad));
  });
  if (blockIdx.y == 0) {
    for_own_channel(t, n.channels, [&](int channel, int) { finish(n, channel, all); });
  }
  cluster.barrier_wait();  // others have read this block's sums
#endif
}

template <typename scalar_t, NormMask MASK>
cudaError_t launch(const BatchNormBackward& n,
                   const NormTiling& t,
                   const NormScratch& scratch,
                   cudaStream_t stream) {
  if (t.cluster) {
    return launch_norm(batch_norm_backward_cluster_kernel<scalar_t, MASK>, t, stream, n, t);
  }
  const auto error = launch_norm(norm_sums_kernel<scalar_t, MASK>, t, stream, n, t, scratch);
  if (error != cudaSuccess) return error;
  if (n.grad_input_bias != nullptr) {
    return launch_norm(norm_grad_and_bias_kernel<scalar_t, MASK>, t, stream, n, t, scratch);
  }
  const NormTiling wide = widened(t, n.rows, n.channels);
  return launch_norm(norm_grad_kernel<scalar_t, MASK>, wide, stream, n, wide);
}

template <typename scalar_t>
cudaError_t launch(const BatchNormBackward& n,
                   const NormTiling& t,
                   const NormScratch& scratch,
                   cudaStream_t stream) {
  switch (n.mask) {
    case NormMask::kNone:
      return launch<scalar_t, NormMask::kNone>(n, t, scratch, stream);
    case NormMask::kOfOutput:
      return launch<scalar_t, NormMask::kOfOutput>(n, t, scratch, stream);
    case NormMask::kOfResult:
      return launch<scalar_t, NormMask::kOfResult>(n, t, scratch, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t batch_norm_backward_cuda(const BatchNormBackward& n,
                                     const NormTiling& tiling,
                                     const NormScratch& scratch,
                                     cudaStream_t stream) {
  return n.bfloat16 ? launch<__nv_bfloat16>(n, tiling, scratch, stream)
                    : launch<__half>(n, tiling, scratch, stream);
}

}  // namespace torch_renaissance
