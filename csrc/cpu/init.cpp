// SPDX-License-Identifier: BSD-3-Clause
// fill_random_ on the CPU: blocks of random bits, in parallel.
#include "../init.h"

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

namespace torch_renaissance {
namespace {

constexpr int64_t kBlockGrain = 4096;

template <typename scalar_t, typename Round>
void fill(const Fill& f, Round round) {
  at::parallel_for(0, (f.count + 1) / 2, kBlockGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) fill_block<scalar_t>(f, i, round);
  });
}

}  // namespace

void fill_random_cpu(const Fill& f) {
  switch (f.dtype) {
    case ScalarType::kFloat:
      return fill<float>(f, [](double x) { return static_cast<float>(x); });
    case ScalarType::kDouble:
      return fill<double>(f, [](double x) { return x; });
    case ScalarType::kHalf:
      return fill<c10::Half>(f, [](double x) { return c10::Half(static_cast<float>(x)); });
    case ScalarType::kBFloat16:
      return fill<c10::BFloat16>(f, [](double x) { return c10::BFloat16(static_cast<float>(x)); });
  }
}

}  // namespace torch_renaissance
