// SPDX-License-Identifier: BSD-3-Clause
// What Python needs to lay out regions: slices with a storage of their own, who shares a storage,
// and chunk tables.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "python_objects.h"
#include "update.h"

namespace torch_renaissance {

// A tensor of its own storage over part of a region: tools that look at storages see an ordinary
// tensor, and the deleter keeps the region alive.
inline py::object slice_of(const py::object& region, int64_t offset, const py::object& like) {
  const at::Tensor& r = unpack(region.ptr());
  const at::Tensor& l = unpack(like.ptr());
  auto data = static_cast<char*>(r.data_ptr()) + offset * r.element_size();
  at::Tensor slice =
      at::from_blob(data, l.sizes(), l.strides(), [r](void*) {}, r.options(), r.device());
  return wrap(slice);
}

// torch keeps a storage's Python object once it was asked for; alone, that is no holder. (Before
// 2.10 it isn't counted, and there is no such question.)
template <typename PyObjectSlot>
auto only_torch_holds(const PyObjectSlot* slot, int) -> decltype(slot->has_unique_reference()) {
  return slot->has_unique_reference();
}
template <typename PyObjectSlot>
bool only_torch_holds(const PyObjectSlot*, long) {
  return false;
}

// How many tensors and Python storages share the memory of `tensor`, itself included.
inline int64_t storage_holders(const py::object& tensor) {
  const c10::Storage& storage = unpack(tensor.ptr()).storage();
  const bool python = only_torch_holds(storage.unsafeGetStorageImpl()->pyobj_slot(), 0);
  return static_cast<int64_t>(storage.use_count()) - (python ? 1 : 0);
}

// The chunks of tensors with these numbers of elements, at these offsets of their segment.
inline py::object chunk_table(const std::vector<int64_t>& numels,
                              const std::vector<int64_t>& offsets,
                              int64_t element_size) {
  const int64_t length = kChunkBytes / element_size;
  std::vector<Chunk> chunks;
  for (size_t s = 0; s < numels.size(); ++s) {
    int64_t start = 0;
    do {  // an empty tensor has one empty chunk: its step counter goes on
      const auto count = static_cast<int32_t>(std::min(length, numels[s] - start));
      chunks.push_back({offsets[s] + start, start, count, static_cast<int32_t>(s)});
      start += length;
    } while (start < numels[s]);
  }
  at::Tensor table = at::empty({static_cast<int64_t>(chunks.size()), kChunkWords}, at::kLong);
  std::memcpy(table.data_ptr(), chunks.data(), chunks.size() * sizeof(Chunk));
  return wrap(table);
}

}  // namespace torch_renaissance
