// SPDX-License-Identifier: BSD-3-Clause
// How the CPU's loops see a dtype: 16-bit values are integers in memory and fp32 in arithmetic.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cstdint>
#include <type_traits>

// Builds each loop for processors with fused multiply-add as well, and picks at load time; the
// formulas say where to fuse, so all give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#if __GNUC__ >= 12
#define TR_VECTOR_CLONES __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define TR_VECTOR_CLONES __attribute__((target_clones("fma", "default")))
#endif
#else
#define TR_VECTOR_CLONES
#endif

#define TR_INLINE inline __attribute__((always_inline))

namespace torch_renaissance {

template <typename scalar_t>
struct OpMath {
  using type = float;
};
template <>
struct OpMath<double> {
  using type = double;
};
template <typename scalar_t>
using opmath_t = typename OpMath<scalar_t>::type;

// How a dtype lies in memory. The 16-bit ones are handled as integers: gcc vectorises no loop over
// their classes.
template <typename scalar_t>
struct Memory {
  using type = scalar_t;
  static scalar_t load(scalar_t v) { return v; }
  static scalar_t save(scalar_t v) { return v; }
};
template <>
struct Memory<c10::Half> {
  using type = uint16_t;
  // Exponents move by 112 between the formats. Every case is computed and one chosen, so that the
  // loop has no branches; a subnormal is shifted into place by adding or taking away a float.
  static float load(uint16_t v) {
    using namespace c10::detail;
    const uint32_t shifted = (v & 0x7fffu) << 13, sign = (v & 0x8000u) << 16;
    const uint32_t normal = shifted + 0x38000000u, special = shifted + 0x70000000u;
    const uint32_t small =
        fp32_to_bits(fp32_from_bits(shifted + 0x38800000u) - fp32_from_bits(0x38800000u));
    const uint32_t finite = shifted < 0x00800000u ? small : normal;
    return fp32_from_bits((shifted >= 0x0f800000u ? special : finite) | sign);
  }
  static uint16_t save(float v) {
    using namespace c10::detail;
    const uint32_t bits = fp32_to_bits(v), sign = bits & 0x80000000u, size = bits ^ sign;
    const uint32_t special = size > 0x7f800000u ? 0x7e00u : 0x7c00u;
    const uint32_t small = fp32_to_bits(fp32_from_bits(size) + 0.5f) - 0x3f000000u;
    const uint32_t normal = (size + 0xc8000fffu + ((size >> 13) & 1)) >> 13;  // to nearest even
    const uint32_t finite = size < 0x38800000u ? small : normal;
    const uint32_t chosen = size >= 0x47800000u ? special : finite;
    return static_cast<uint16_t>(chosen | sign >> 16);
  }
};
template <>
struct Memory<c10::BFloat16> {
  using type = uint16_t;
  static float load(uint16_t v) { return c10::detail::f32_from_bits(v); }
  static uint16_t save(float v) { return c10::detail::round_to_nearest_even(v); }
};
template <typename scalar_t>
using memory_t = typename Memory<scalar_t>::type;

void load_half(float* to, const uint16_t* from, int64_t n);
void load_bfloat16(float* to, const uint16_t* from, int64_t n);
void save_half(uint16_t* to, const float* from, int64_t n);
void save_bfloat16(uint16_t* to, const float* from, int64_t n);

template <typename scalar_t>
void load_values(float* to, const uint16_t* from, int64_t n) {
  constexpr bool half = std::is_same_v<scalar_t, c10::Half>;
  half ? load_half(to, from, n) : load_bfloat16(to, from, n);
}

template <typename scalar_t>
void save_values(uint16_t* to, const float* from, int64_t n) {
  constexpr bool half = std::is_same_v<scalar_t, c10::Half>;
  half ? save_half(to, from, n) : save_bfloat16(to, from, n);
}

}  // namespace torch_renaissance
