// SPDX-License-Identifier: BSD-3-Clause
// Grids of batch normalisation's kernels, and the launch of a cluster.
#pragma once

#include <algorithm>

#include "batch_norm.cuh"

namespace torch_renaissance {

inline dim3 norm_grid(const NormTiling& t) {
  return dim3(static_cast<unsigned>(t.tiles), static_cast<unsigned>(t.chunks));
}

// For a launch that only writes: about as many blocks, with tiles as wide as a warp, whose rows are
// longer runs of memory.
inline NormTiling widened(NormTiling t, int64_t rows, int channels) {
  const int vectors = (channels + kNormVector - 1) / kNormVector;
  const int blocks = t.tiles * t.chunks;
  while (t.log2_vectors < 5 && (1 << t.log2_vectors) < vectors) ++t.log2_vectors;
  t.tiles = (vectors + (1 << t.log2_vectors) - 1) >> t.log2_vectors;
  const int64_t lanes = kNormThreads >> t.log2_vectors;
  const int64_t most = std::max<int64_t>(1, rows / (lanes * kNormRows));
  const int64_t chunks = std::clamp<int64_t>(blocks / t.tiles, 1, most);
  t.rows_per_chunk = (rows + chunks - 1) / chunks;
  t.chunks = static_cast<int>((rows + t.rows_per_chunk - 1) / t.rows_per_chunk);
  return t;
}

// A cluster of more than 8 blocks is not for every GPU; see most_blocks_of_cluster().
template <typename Kernel>
void allow_large_clusters(Kernel kernel) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
}

// Where the GPU can, the kernel's blocks get their places before the kernel ahead of it has ended;
// they wait_for_previous() themselves.
template <typename... Parameters, typename... Arguments>
cudaError_t launch_norm(void (*kernel)(Parameters...),
                        const NormTiling& t,
                        cudaStream_t stream,
                        const Arguments&... arguments) {
  cudaLaunchAttribute attributes[2]{};
  unsigned count = 0;
  if (t.cluster) {
    if (t.chunks > 8) allow_large_clusters(kernel);
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim.x = 1;
    attributes[count].val.clusterDim.y = static_cast<unsigned>(t.chunks);
    attributes[count++].val.clusterDim.z = 1;
  }
  if (has_clusters()) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  cudaLaunchConfig_t config{};
  config.gridDim = norm_grid(t);
  config.blockDim = dim3(kNormThreads);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace torch_renaissance
