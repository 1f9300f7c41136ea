// SPDX-License-Identifier: BSD-3-Clause
// Conversions of 16-bit values, for the vector units of the processor at hand.
#include "values.h"

namespace torch_renaissance {

TR_VECTOR_CLONES void load_half(float* __restrict__ to,
                                const uint16_t* __restrict__ from,
                                int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Memory<c10::Half>::load(from[i]);
}
TR_VECTOR_CLONES void load_bfloat16(float* __restrict__ to,
                                    const uint16_t* __restrict__ from,
                                    int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Memory<c10::BFloat16>::load(from[i]);
}
TR_VECTOR_CLONES void save_half(uint16_t* __restrict__ to,
                                const float* __restrict__ from,
                                int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Memory<c10::Half>::save(from[i]);
}
TR_VECTOR_CLONES void save_bfloat16(uint16_t* __restrict__ to,
                                    const float* __restrict__ from,
                                    int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = Memory<c10::BFloat16>::save(from[i]);
}

}  // namespace torch_renaissance
