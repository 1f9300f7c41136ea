// SPDX-License-Identifier: BSD-3-Clause
// Turns an op's tensors into plain addresses, after checking them. Kernels trust what they get.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "math/hyper.h"
#include "update.h"

namespace torch_renaissance {

inline ScalarType scalar_type(const char* op, const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return ScalarType::kFloat;
    case at::kDouble:
      return ScalarType::kDouble;
    case at::kHalf:
      return ScalarType::kHalf;
    case at::kBFloat16:
      return ScalarType::kBFloat16;
    default:
      TORCH_CHECK(false,
                  op,
                  ": dtype ",
                  t.scalar_type(),
                  " is not supported; use float32, ",
                  "float64, float16 or bfloat16");
  }
}

// Where a slot's data begin. An empty tensor has no address; any non-null one marks its slot as
// taking part.
inline void* address_of(const at::Tensor& t) {
  static char none;
  return t.numel() > 0 ? t.data_ptr() : &none;
}

// Equal strides wherever they matter.
inline bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

inline void check_plane(const char* op,
                        const char* name,
                        size_t i,
                        const at::Tensor& plane,
                        const at::Tensor& like) {
  TORCH_CHECK(plane.scalar_type() == like.scalar_type() && plane.device() == like.device(),
              op,
              ": ",
              name,
              "[",
              i,
              "] is ",
              plane.scalar_type(),
              " on ",
              plane.device(),
              ", expected ",
              like.scalar_type(),
              " on ",
              like.device());
  TORCH_CHECK(plane.is_contiguous(), op, ": ", name, "[", i, "] must be contiguous");
}

// A plane must have room for the tensors of its segment.
template <typename Work>
void check_room(const char* op,
                const Work& work,
                at::TensorList params,
                at::IntArrayRef places,
                at::ArrayRef<at::TensorList> planes) {
  int64_t needed[kMaxSegments] = {};
  for (size_t i = 0; i < params.size(); ++i) {
    int s = 0;
    while (places[i] >= work.segments[s].first_slot + work.segments[s].n_slots) ++s;
    needed[s] += params[i].numel();
  }
  for (size_t p = 0; p < planes.size(); ++p) {
    for (int s = 0; s < work.n_segments; ++s) {
      const int64_t size = planes[p][s].numel();
      TORCH_CHECK(size == 0 || size >= needed[s],
                  op,
                  ": state plane ",
                  p,
                  " of segment ",
                  s,
                  " has ",
                  size,
                  " elements for tensors of ",
                  needed[s]);
    }
  }
}

// Fills slots (those without a gradient keep null) and segments. `counts` is how many slots each
// segment has; plane p of segment i is planes[p][i], or an empty tensor where there is none.
template <typename Work>
void describe(const char* op,
              Work& work,
              std::vector<Slot>& slots,
              at::TensorList params,
              at::TensorList grads,
              at::IntArrayRef places,
              at::IntArrayRef rows,
              at::ArrayRef<at::TensorList> planes,
              at::TensorList chunks,
              at::IntArrayRef counts) {
  TORCH_CHECK(params.size() == grads.size() && params.size() == places.size(),
              op,
              ": got ",
              params.size(),
              " params, ",
              grads.size(),
              " grads and ",
              places.size(),
              " slots");
  TORCH_CHECK(chunks.size() == counts.size() && chunks.size() <= size_t{kMaxSegments},
              op,
              ": got ",
              chunks.size(),
              " chunk tables for ",
              counts.size(),
              " segments, at most ",
              kMaxSegments);
  const at::Tensor& first = params.front();
  work.dtype = scalar_type(op, first);
  work.n_segments = static_cast<int>(chunks.size());
  int64_t total = 0;
  for (size_t i = 0; i < chunks.size(); ++i) {
    Segment& segment = work.segments[i];
    segment = Segment{};
    TORCH_CHECK(chunks[i].scalar_type() == at::kLong && chunks[i].device() == first.device() &&
                    chunks[i].is_contiguous() && chunks[i].dim() == 2 &&
                    chunks[i].size(1) == kChunkWords,
                op,
                ": chunks[",
                i,
                "] must be a contiguous int64 tensor [n, ",
                kChunkWords,
                "] on ",
                first.device());
    segment.chunks = reinterpret_cast<const Chunk*>(chunks[i].const_data_ptr());
    segment.n_chunks = chunks[i].size(0);
    segment.first_slot = static_cast<int32_t>(total);
    segment.n_slots = static_cast<int32_t>(counts[i]);
    total += counts[i];
    for (size_t p = 0; p < planes.size(); ++p) {
      TORCH_CHECK(planes[p].size() == chunks.size(),
                  op,
                  ": got ",
                  planes[p].size(),
                  " tensors of state plane ",
                  p,
                  " for ",
                  chunks.size(),
                  " segments");
      if (planes[p][i].numel() == 0) continue;
      check_plane(op, "planes", i, planes[p][i], first);
      segment.planes[p] = planes[p][i].data_ptr();
    }
  }
  slots.assign(total, Slot{});
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor &param = params[i], &grad = grads[i];
    TORCH_CHECK(places[i] >= 0 && places[i] < total,
                op,
                ": slots[",
                i,
                "] is ",
                places[i],
                ", expected 0 to ",
                total - 1);
    TORCH_CHECK(param.scalar_type() == first.scalar_type() && param.device() == first.device(),
                op,
                ": params[",
                i,
                "] is ",
                param.scalar_type(),
                " on ",
                param.device(),
                ", expected ",
                first.scalar_type(),
                " on ",
                first.device());
    TORCH_CHECK(grad.scalar_type() == param.scalar_type() && grad.device() == param.device(),
                op,
                ": grads[",
                i,
                "] is ",
                grad.scalar_type(),
                " on ",
                grad.device(),
                ", expected ",
                param.scalar_type(),
                " on ",
                param.device());
    TORCH_CHECK(grad.sizes() == param.sizes(),
                op,
                ": grads[",
                i,
                "] has shape ",
                grad.sizes(),
                ", expected ",
                param.sizes());
    TORCH_CHECK(param.is_non_overlapping_and_dense(),
                op,
                ": params[",
                i,
                "] has strides ",
                param.strides(),
                ", which leave gaps or overlap");
    TORCH_CHECK(same_layout(param, grad),
                op,
                ": grads[",
                i,
                "] has strides ",
                grad.strides(),
                ", expected ",
                param.strides());
    TORCH_CHECK(slots[places[i]].param == nullptr,
                op,
                ": slots[",
                i,
                "] is ",
                places[i],
                ", which another tensor has");
    slots[places[i]] = {
        address_of(param), address_of(grad), rows.empty() ? 0 : static_cast<int32_t>(rows[i]), 0};
  }
  check_room(op, work, params, places, planes);
  work.slots = slots.data();
  work.n_slots = total;
}

inline const float* scalar_address(const char* op,
                                   const char* name,
                                   const std::optional<at::Tensor>& t,
                                   const at::Tensor& like) {
  if (!t.has_value()) return nullptr;
  TORCH_CHECK(t->scalar_type() == at::kFloat && t->numel() == 1 && t->device() == like.device(),
              op,
              ": ",
              name,
              " must be one float32 on ",
              like.device(),
              ", got ",
              t->numel(),
              " of ",
              t->scalar_type(),
              " on ",
              t->device());
  return t->const_data_ptr<float>();
}

// What sgd_ and adam_ share beyond describe(): counters, table, scale and flag.
inline void describe_update(const char* op,
                            Update& u,
                            const at::Tensor& like,
                            at::TensorList steps,
                            const at::Tensor& counters,
                            const at::Tensor& hyper,
                            at::IntArrayRef rows,
                            bool counts_skips,
                            const std::optional<at::Tensor>& grad_scale,
                            const std::optional<at::Tensor>& found_inf) {
  for (size_t i = 0; i < steps.size(); ++i) {
    TORCH_CHECK(steps[i].scalar_type() == at::kFloat && steps[i].device() == like.device() &&
                    steps[i].is_contiguous(),
                op,
                ": steps[",
                i,
                "] must be contiguous float32 on ",
                like.device());
    u.segments[i].steps = steps[i].data_ptr<float>();
  }
  TORCH_CHECK(counters.scalar_type() == at::kInt && counters.numel() == kCounters &&
                  counters.device() == like.device(),
              op,
              ": counters must be ",
              int{kCounters},
              " int32 on ",
              like.device());
  TORCH_CHECK(hyper.scalar_type() == at::kDouble && hyper.dim() == 2 &&
                  hyper.size(1) == kHyperColumns && hyper.is_contiguous() &&
                  hyper.device() == like.device(),
              op,
              ": hyper must be a contiguous float64 tensor [rows, ",
              int{kHyperColumns},
              "] on ",
              like.device());
  for (size_t i = 0; i < rows.size(); ++i) {
    TORCH_CHECK(rows[i] >= 0 && rows[i] < hyper.size(0),
                op,
                ": rows[",
                i,
                "] is ",
                rows[i],
                ", expected 0 to ",
                hyper.size(0) - 1);
  }
  u.counters = counters.data_ptr<int32_t>();
  u.hyper = hyper.const_data_ptr<double>();
  u.counts_skips = counts_skips;
  u.grad_scale = scalar_address(op, "grad_scale", grad_scale, like);
  u.found_inf = scalar_address(op, "found_inf", found_inf, like);
}

inline std::vector<int64_t> slot_counts(at::TensorList steps) {
  std::vector<int64_t> counts;
  for (const at::Tensor& s : steps) counts.push_back(s.numel());
  return counts;
}

}  // namespace torch_renaissance
