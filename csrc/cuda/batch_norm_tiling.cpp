// SPDX-License-Identifier: BSD-3-Clause
// How batch normalisation shares a matrix among blocks.
#include <algorithm>
#include <array>
#include <atomic>

#include "batch_norm.h"
#include "launch.h"

namespace torch_renaissance {
namespace {

constexpr int kWidest = 4;     // log2 of a tile's vectors: a run of 128 bytes
constexpr int kNarrowest = 2;  // a sector of 32 bytes
// Smaller matrices of few channels have narrower tiles: there the time of a tile's last block
// counts, which adds up the chunks of all its channels, more than the length of runs.
constexpr int kFewChannels = 128;
constexpr int64_t kSmall = 16 << 20;  // numbers

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int log2_up(int64_t n) {
  int log2 = 0;
  while ((int64_t{1} << log2) < n) ++log2;
  return log2;
}

// Asked once for each device, since the answer takes the driver a while.
int cluster_limit() {
  static std::array<std::atomic<int>, 64> known{};
  int device = 0;
  cudaGetDevice(&device);
  auto& limit = known[static_cast<size_t>(device) % known.size()];
  if (limit == 0) limit = most_blocks_of_cluster();
  return limit;
}

NormTiling with_chunks(int log2_vectors,
                       int64_t tiles,
                       int64_t rows,
                       int64_t chunks,
                       bool cluster) {
  const int64_t per_chunk = divide_up(rows, chunks);
  const auto used = static_cast<int>(divide_up(rows, per_chunk));  // no chunk is empty
  return {log2_vectors, static_cast<int>(tiles), used, per_chunk, cluster};
}

// About two blocks for each multiprocessor.
NormTiling without_clusters(int64_t rows, int64_t vectors, int log2_vectors) {
  const int64_t lanes = kNormThreads >> log2_vectors;
  const int64_t tiles = divide_up(vectors, int64_t{1} << log2_vectors);
  const int64_t most = std::max<int64_t>(1, rows / (lanes * kNormRows));
  const int64_t chunks = std::clamp<int64_t>(2 * multiprocessors() / tiles, 1, most);
  return with_chunks(log2_vectors, tiles, rows, chunks, false);
}

}  // namespace

bool has_clusters() { return cluster_limit() > 1; }

NormTiling norm_tiling(int64_t rows, int channels) {
  const int64_t vectors = divide_up(channels, kNormVector), limit = cluster_limit();
  const int64_t multis = multiprocessors();
  const auto tiles_of = [&](int log2) { return divide_up(vectors, 1 << log2); };
  // In clusters, if all surely run at once: half of the multiprocessors have place for them,
  // however they are grouped. The narrower the tiles, the smaller the clusters.
  const int64_t places = multis / 2;
  for (int log2 = std::min(kNarrowest, log2_up(vectors)); limit > 1 && log2 <= kWidest; ++log2) {
    const int64_t lanes = kNormThreads >> log2, tiles = tiles_of(log2);
    const int64_t least = divide_up(rows, lanes * kHeldRows);
    if (least > limit || least * tiles > places) continue;
    const int64_t enough = divide_up(rows, lanes * 2);
    const int64_t chunks = std::min(enough, std::min(limit, places / tiles));
    return with_chunks(log2, tiles, rows, std::max(least, chunks), true);
  }
  const bool narrow = channels <= kFewChannels && rows * channels < kSmall;
  const int widest = narrow ? kWidest - 1 : kWidest;
  return without_clusters(rows, vectors, std::min(widest, log2_up(vectors)));
}

NormTiling column_tiling(int64_t rows, int channels) {
  const int64_t vectors = divide_up(channels, kNormVector);
  return without_clusters(rows, vectors, std::min(kWidest, log2_up(vectors)));
}

}  // namespace torch_renaissance
