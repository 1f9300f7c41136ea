// SPDX-License-Identifier: BSD-3-Clause
// Making nodes of torch's autograd, whose pointers differ between versions of torch.
#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>

#include <memory>
#include <type_traits>
#include <utility>

namespace torch_renaissance {

template <typename N, typename... Arguments>
auto make_node(Arguments&&... arguments) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, N>) {
    return c10::make_intrusive<N>(std::forward<Arguments>(arguments)...);
  } else {
    return std::shared_ptr<N>(new N(std::forward<Arguments>(arguments)...),
                              [](N* node) { deleteNode(node); });
  }
}

// Of a node that is in such a pointer already.
template <typename N>
auto pointer_to(N* node) {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, N>) {
    return c10::intrusive_ptr<torch::autograd::Node>::reclaim_copy(node);
  } else {
    return node->shared_from_this();
  }
}

}  // namespace torch_renaissance
