// SPDX-License-Identifier: BSD-3-Clause
// fill_random_, the op of tr.init: its schema, and its checks, which are the same on all devices.
#include "init.h"

#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <cmath>
#include <limits>
#include <string_view>

#include "checks.h"

#ifdef TR_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include "cuda/init.h"
#endif

namespace torch_renaissance {
namespace {

Distribution distribution_of(std::string_view name) {
  if (name == "uniform") return Distribution::kUniform;
  if (name == "normal") return Distribution::kNormal;
  TORCH_CHECK(name == "trunc_normal",
              "fill_random_: distribution must be uniform, normal or trunc_normal, got ",
              name);
  return Distribution::kTruncNormal;
}

double largest(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::kFloat:
      return std::numeric_limits<float>::max();
    case ScalarType::kDouble:
      return std::numeric_limits<double>::max();
    case ScalarType::kHalf:
      return std::numeric_limits<c10::Half>::max();
    case ScalarType::kBFloat16:
      return std::numeric_limits<c10::BFloat16>::max();
  }
  return 0;
}

void check_parameters(const Fill& f) {
  if (f.distribution == Distribution::kUniform) {
    const double bound = largest(f.dtype);
    TORCH_CHECK(-bound <= f.a && f.a <= f.b && f.b <= bound && std::isfinite(f.b - f.a),
                "fill_random_: the bounds of a uniform distribution must be in order and within "
                "the dtype's range, got a = ",
                f.a,
                " and b = ",
                f.b);
  } else {
    TORCH_CHECK(std::isfinite(f.a) && f.b >= 0 && std::isfinite(f.b),
                "fill_random_: a normal distribution needs a finite mean and a finite standard "
                "deviation of at least 0, got a = ",
                f.a,
                " and b = ",
                f.b);
  }
}

void fill(const Fill& f, c10::Device device) {
#ifdef TR_WITH_CUDA
  if (device.is_cuda()) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(fill_random_cuda(f, c10::cuda::getCurrentCUDAStream()));
    return;
  }
#endif
  fill_random_cpu(f);
}

// Values go by the index within the tensor, so another layout in memory gets them by a copy.
void fill_random_(const at::Tensor& out,
                  int64_t seed,
                  int64_t stream,
                  std::string_view distribution,
                  double a,
                  double b) {
  Fill f;
  f.dtype = scalar_type("fill_random_", out);
  f.distribution = distribution_of(distribution);
  f.a = a;
  f.b = b;
  check_parameters(f);
  f.seed = static_cast<uint64_t>(seed);
  f.stream = static_cast<uint64_t>(stream);
  out.unsafeGetTensorImpl()->bump_version();  // no autograd kernel does it for this op
  if (out.is_meta()) return;                  // whose sizes may be symbols
  f.count = out.numel();
  if (f.count == 0) return;
  const at::Tensor dense = out.is_contiguous() ? out : at::empty(out.sizes(), out.options());
  f.out = dense.data_ptr();
  fill(f, out.device());
  if (!dense.is_same(out)) out.copy_(dense);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_renaissance, m) {
  m.def(
      "fill_random_(Tensor(a!) out, int seed, int stream, str distribution, float a, float b) -> "
      "()");
}

TORCH_LIBRARY_IMPL(torch_renaissance, CPU, m) { m.impl("fill_random_", fill_random_); }
#ifdef TR_WITH_CUDA
TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) { m.impl("fill_random_", fill_random_); }
#endif
TORCH_LIBRARY_IMPL(torch_renaissance, Meta, m) { m.impl("fill_random_", fill_random_); }

}  // namespace torch_renaissance
