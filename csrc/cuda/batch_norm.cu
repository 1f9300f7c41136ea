// SPDX-License-Identifier: BSD-3-Clause
// Batch normalisation forward: the batch's moments, then its rows; see Note [One launch or two].
#include <cstring>

#include "batch_norm_launch.cuh"
#include "batch_norm_rows.cuh"
#include "last_node.h"

namespace torch_renaissance {
namespace {

// -- Two launches ---------------------------------------------------------------------------------

template <typename scalar_t>
__global__ void __launch_bounds__(kNormThreads, 2)
    moments_kernel(const __grid_constant__ BatchNorm n,
                   const NormTiling t,
                   const NormScratch scratch) {
  __shared__ NormShared shared;
  const auto p = NormPlace::of(t, n.rows, n.channels);
  wait_for_previous();
  let_next_come();
  MomentSums<scalar_t> sums(n, p);
#pragma unroll 1
  for (int64_t r = p.first + p.lane; r < p.last; r += kMomentRows * p.lanes) {
    NormBits bits[kMomentRows];
    for_rows<kMomentRows>(p, r, p.lanes, n.channels, [&](int u, int64_t place) {
      bits[u] = read_bits<scalar_t>(n.input, place);
    });
    for_rows<kMomentRows>(
        p, r, p.lanes, n.channels, [&](int u, int64_t place) { sums.add(n, bits[u], place); });
  }
  const Moments own = sums.of_block(p, shared);
  if (!is_last_of_tile(t, scratch, {own.mean, own.squares}, shared)) return;
  const auto total = add_chunks<MomentsOfGroups>(
      t, scratch, shared, [&](MomentsOfGroups& all, float2 chunk, int i, float2 shift) {
        all.add({chunk.x, chunk.y}, rows_of_chunk(n, t, i), shift.x);
      });
  for_own_channel(t, n.channels, [&](int channel, int in_tile) {
    const float shift = first_of_chunks(t, scratch, in_tile).x;
    finish<scalar_t>(n, channel, total.total(shift, static_cast<float>(n.rows)));
  });
}

template <typename scalar_t>
__global__ void __launch_bounds__(kNormThreads, 2)
    normalise_kernel(const __grid_constant__ BatchNorm n, const NormTiling t) {
  const auto p = NormPlace::of(t, n.rows, n.channels);
  wait_for_previous();
  if (p.first + p.lane >= p.last) return;
  Normalise norm[kNormVector];
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) {
    const int c = p.channel + k;
    norm[k] = {n.mean[c], n.weight[c] * n.invstd[c], n.bias[c]};
  }
#pragma unroll 1
  for (int64_t r = p.last - 1 - p.lane; r >= p.first; r -= kNormRows * p.lanes) {
    NormBits bits[kNormRows], residual[kNormRows];
    for_rows<kNormRows>(p, r, -p.lanes, n.channels, [&](int u, int64_t place) {
      bits[u] = read_bits<scalar_t>(n.input, place);
      if (n.residual != nullptr) residual[u] = read_bits<scalar_t>(n.residual, place);
    });
    for_rows<kNormRows>(p, r, -p.lanes, n.channels, [&](int u, int64_t place) {
      write_row<scalar_t>(n, norm, bits[u], residual[u], place);
    });
  }
}

// -- One launch -----------------------------------------------------------------------------------

template <typename scalar_t>
__global__ void __launch_bounds__(kNormThreads)
    batch_norm_cluster_kernel(const __grid_constant__ BatchNorm n, const NormTiling t) {
#ifdef TR_HAS_CLUSTERS
  __shared__ NormShared shared;
  const auto cluster = cooperative_groups::this_cluster();
  const auto p = NormPlace::of(t, n.rows, n.channels);
  wait_for_previous();
  const int64_t first = p.first + p.lane;
  NormBits bits[kHeldRows], residual[kHeldRows];
  for_rows<kHeldRows>(p, first, p.lanes, n.channels, [&](int u, int64_t place) {
    bits[u] = read_bits<scalar_t>(n.input, place);
  });
  MomentSums<scalar_t> sums(n, p);
  Normalise norm[kNormVector];
  for_rows<kHeldRows>(p, first, p.lanes, n.channels, [&](int u, int64_t place) {
    if (n.residual != nullptr) residual[u] = read_bits<scalar_t>(n.residual, place);
  });
  if (first < p.last) {
#pragma unroll
    for (int k = 0; k < kNormVector; ++k) {
      norm[k] = {0, n.weight[p.channel + k], n.bias[p.channel + k]};
    }
  }
  for_rows<kHeldRows>(
      p, first, p.lanes, n.channels, [&](int u, int64_t place) { sums.add(n, bits[u], place); });
  const Moments own = sums.of_block(p, shared);
  if (threadIdx.x < t.tile_channels()) shared.of_block[threadIdx.x] = {own.mean, own.squares};
  cluster.sync();
  Moments all{};
  for_own_channel(t, n.channels, [&](int, int in_tile) {
    const float shift = cluster.map_shared_rank(shared.of_block, 0)[in_tile].x;
    MomentsOfGroups groups;
#pragma unroll 4
    for (int chunk = 0; chunk < t.chunks; ++chunk) {
      const float2 m = cluster.map_shared_rank(shared.of_block, chunk)[in_tile];
      groups.add({m.x, m.y}, rows_of_chunk(n, t, chunk), shift);
    }
    all = groups.total(shift, static_cast<float>(n.rows));
    shared.first[in_tile] = all.mean;
    shared.second[in_tile] = inverse_std(all, static_cast<float>(n.rows), n.eps);
  });
  cluster.barrier_arrive();
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kNormVector; ++k) {
    norm[k].mean = shared.first[p.in_tile + k];
    norm[k].scale *= shared.second[p.in_tile + k];
  }
  for_rows<kHeldRows>(p, first, p.lanes, n.channels, [&](int u, int64_t place) {
    write_row<scalar_t>(n, norm, bits[u], residual[u], place);
  });
  if (blockIdx.y == 0) {
    for_own_channel(t, n.channels, [&](int channel, int) { finish<scalar_t>(n, channel, all); });
  }
  cluster.barrier_wait();  // others have read this block's sums
#endif
}

template <typename scalar_t>
cudaError_t launch(const BatchNorm& n,
                   const NormTiling& t,
                   const NormScratch& scratch,
                   cudaStream_t stream,
                   cudaGraphNode_t* reader) {
  if (t.cluster) {
    const auto error = launch_norm(batch_norm_cluster_kernel<scalar_t>, t, stream, n, t);
    *reader = last_node(stream).node;
    return error;
  }
  const auto error = launch_norm(moments_kernel<scalar_t>, t, stream, n, t, scratch);
  if (error != cudaSuccess) return error;
  *reader = last_node(stream).node;
  const NormTiling wide = widened(t, n.rows, n.channels);
  return launch_norm(normalise_kernel<scalar_t>, wide, stream, n, wide);
}

}  // namespace

cudaError_t batch_norm_cuda(const BatchNorm& n,
                            const NormTiling& tiling,
                            const NormScratch& scratch,
                            cudaStream_t stream,
                            cudaGraphNode_t* reader) {
  return n.bfloat16 ? launch<__nv_bfloat16>(n, tiling, scratch, stream, reader)
                    : launch<__half>(n, tiling, scratch, stream, reader);
}

int most_blocks_of_cluster() {
  const auto kernel = batch_norm_cluster_kernel<__half>;
  cudaFuncAttributes attributes;
  if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return 1;
  if (attributes.ptxVersion < 90) return 1;  // translated from code without clusters
  allow_large_clusters(kernel);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(1, 16);
  config.blockDim = dim3(kNormThreads);
  int size = 1;
  if (cudaOccupancyMaxPotentialClusterSize(&size, kernel, &config) != cudaSuccess) return 1;
  return size;
}

cudaError_t set_batch_norm_cuda(const BatchNorm& n, cudaGraphNode_t node) {
  cudaKernelNodeParams p{};
  if (const cudaError_t error = cudaGraphKernelNodeGetParams(node, &p)) return error;
  BatchNorm norm = n;
  NormTiling tiling;
  std::memcpy(&tiling, p.kernelParams[1], sizeof(tiling));
  void* arguments[] = {&norm, &tiling};
  p.kernelParams = arguments;
  return cudaGraphKernelNodeSetParams(node, &p);
}

cudaError_t leave_bias_cuda(cudaGraphNode_t reader, bool cluster) {
  cudaKernelNodeParams p{};
  if (const cudaError_t error = cudaGraphKernelNodeGetParams(reader, &p)) return error;
  BatchNorm norm;
  NormTiling tiling;
  NormScratch scratch{};
  std::memcpy(&norm, p.kernelParams[0], sizeof(norm));
  std::memcpy(&tiling, p.kernelParams[1], sizeof(tiling));
  if (!cluster) std::memcpy(&scratch, p.kernelParams[2], sizeof(scratch));
  norm.input_bias = nullptr;
  void* arguments[] = {&norm, &tiling, &scratch};
  p.kernelParams = arguments;
  return cudaGraphKernelNodeSetParams(reader, &p);
}

}  // namespace torch_renaissance
