// SPDX-License-Identifier: BSD-3-Clause
// What an optimizer update walks over: slots (tensors), segments (regions of state) and chunks.
// Plain C++, for host and device, without torch's headers.
#pragma once

#include <cstdint>

namespace torch_renaissance {

// A run of elements of one tensor; one CUDA block, or one turn of the CPU loop, updates one chunk.
struct Chunk {
  int64_t offset;  // of its first element in the segment's planes
  int64_t start;   // of its first element in the tensor
  int32_t count;
  int32_t slot;  // within the segment
};

inline constexpr int kChunkBytes = 8192;
inline constexpr int kChunkWords = sizeof(Chunk) / sizeof(int64_t);
static_assert(sizeof(Chunk) == 24, "the chunk table is an int64 tensor [n, 3]");

// What differs from slot to slot. A 16-bit gradient belongs to a float32 parameter.
enum SlotFlag : int32_t {
  kHalfGrad = 1,
  kBFloat16Grad = 2,
  kWritesHalf = 4,  // into the segment's plane `low`
  kWritesBFloat16 = 8,
};

// One parameter of the step: where it and its gradient lie now. A null gradient: leave it alone.
struct Slot {
  void* param;
  void* grad;
  int32_t row;  // of the table of hyper-parameters
  int32_t flags;
};

inline constexpr int kMaxPlanes = 3;
inline constexpr int kMaxSegments = 16;
// Slots a launch can take: CUDA kernel arguments hold at most 32,764 bytes.
inline constexpr int64_t kMaxSlots = 1216;

// Of one tensor, under a rule that needs them: Euclidean norms of weight and gradient, the latter
// as it lies in memory (scaled, not clipped), and the trust ratio of its last update.
struct SlotNorms {
  double weight, grad, ratio;
};

// Of one chunk: sums of squares.
struct ChunkSquares {
  double weight, grad;
};

// State planes share offsets; a plane that the segment doesn't need is null.
struct Segment {
  void* planes[kMaxPlanes];
  void* ema;  // averaged weights
  void* low;  // 16-bit copies of the weights
  float* steps;
  SlotNorms* norms;  // [n_slots]; behind them lie ChunkSquares [n_chunks]
  const Chunk* chunks;
  int64_t n_chunks;
  int32_t first_slot;
  int32_t n_slots;
};

enum Counter : int {
  kTicket,
  kSkipped,
  kAveraged,
  kRound,    // which of two counters the next Note [Verdict] counts with
  kArrived,  // the first of them
  kCounters = kArrived + 2,
};

// Note [Ticket]
// Every block reads step counters that the same launch must advance. Each block takes a ticket
// once it has read its counter; whoever draws the last one knows that nobody will read again, and
// advances all of them. Integer atomics only, so the result doesn't depend on the order.

enum class Rule { kSgd, kAdam, kLars };
enum class ScalarType { kFloat, kDouble, kHalf, kBFloat16 };

struct Update {
  Rule rule;
  ScalarType dtype;
  const Slot* slots;
  int64_t n_slots;
  Segment segments[kMaxSegments];
  int n_segments;
  const double* hyper;
  int32_t* counters;
  const float* grad_scale;  // may be null
  const float* found_inf;   // may be null
  bool counts_skips;        // one launch of an optimizer's step counts a skipped step
  // Only where the step does more than update (math/chain.h); else null.
  const double* control;
  const double* chain;  // what the norm pass found; null without one
  bool ends_step;       // the last launch of the step on its device
};

// Gradients into one plane a segment: planes[0] is written, only slots and segments are read.
struct Pack {
  ScalarType dtype;
  const Slot* slots;
  int64_t n_slots;
  Segment segments[kMaxSegments];
  int n_segments;
  bool adds;  // to what the planes hold; a missing gradient then adds nothing
};

// One read of all gradients: their norm, and whether all are finite. Several launches of a step
// add up in `chain`; the last one finishes it (math/chain.h).
struct Norm {
  ScalarType dtype;
  const Slot* slots;
  int64_t n_slots;
  Segment segments[kMaxSegments];
  int n_segments;
  const double* control;
  double* chain;
  double* partials;            // kNormPartials of each kind
  const int32_t* first_chunk;  // of each slot, in its segment; null unless each has its own norms
  int32_t* counters;
  const float* grad_scale;  // GradScaler's; may be null
  float* loss_scale;        // ours; may be null
  int32_t* growth_tracker;
  bool first, last;
  bool wide;  // some launch of the step is of float64
};

inline constexpr int kNormPartials = 2048;

// An empty tensor has one empty chunk.
inline int64_t chunks_of(int64_t numel, int64_t element_size) {
  const int64_t length = kChunkBytes / element_size;
  return numel > 0 ? (numel + length - 1) / length : 1;
}

}  // namespace torch_renaissance
