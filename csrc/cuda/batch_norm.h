// SPDX-License-Identifier: BSD-3-Clause
// Raw-pointer launchers of batch normalisation. They return the launch's status; none synchronises.
#pragma once

#include <cuda_runtime_api.h>

#include "../batch_norm.h"
#include "../math/host_device.h"
#include "tickets.h"

namespace torch_renaissance {

inline constexpr int kNormThreads = 512;  // of a block
inline constexpr int kNormRows = 4;       // that a thread reads before it uses the first
inline constexpr int kHeldRows = 8;       // that a thread of a cluster holds in registers

// How a matrix is shared among blocks: tiles of channels, chunks of rows.
struct NormTiling {
  int log2_vectors;        // of a tile, each of kNormVector channels
  int tiles, chunks;       // the grid
  int64_t rows_per_chunk;  // but the last may have fewer
  bool cluster;            // whether a tile's chunks are one, which does all in one launch

  TR_HOST_DEVICE int tile_channels() const { return kNormVector << log2_vectors; }
  // Floats that blocks leave for the last one of their tile, and its ticket.
  int64_t partials() const { return cluster ? 0 : int64_t{2} * tiles * chunks * tile_channels(); }
};

struct NormScratch {
  float* partials;
  int32_t* tickets;  // zeros, one of each tile; null: the device's own
  int first_ticket;  // of the device's own
};

// Of the current device and what this was compiled for; 1 where there are no clusters.
int most_blocks_of_cluster();

// Whether the current device, and what this was compiled for, have clusters: compute capability 9.
bool has_clusters();

// For the current device.
NormTiling norm_tiling(int64_t rows, int channels);

// Of launches that read once, add up, and may write: no clusters.
NormTiling column_tiling(int64_t rows, int channels);

// `reader`: in a capture, gets the node that reads the input; see take_over_bias().
cudaError_t batch_norm_cuda(const BatchNorm& n,
                            const NormTiling& tiling,
                            const NormScratch& scratch,
                            cudaStream_t stream,
                            cudaGraphNode_t* reader);
cudaError_t batch_norm_backward_cuda(const BatchNormBackward& n,
                                     const NormTiling& tiling,
                                     const NormScratch& scratch,
                                     cudaStream_t stream);

// Gives the node of a graph that is being captured, the last that batch_norm_cuda() launched, what
// `n` says now of `relu` and `residual`.
cudaError_t set_batch_norm_cuda(const BatchNorm& n, cudaGraphNode_t node);

// Lets a `reader` add no bias.
cudaError_t leave_bias_cuda(cudaGraphNode_t reader, bool cluster);

}  // namespace torch_renaissance
