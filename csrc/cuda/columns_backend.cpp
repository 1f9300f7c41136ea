// SPDX-License-Identifier: BSD-3-Clause
// The ops on columns on a GPU: sums, GELU of a bias added to them, attention's heads.
#include <ATen/core/Tensor.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <array>
#include <optional>
#include <tuple>

#include "../autocast_rules.h"
#include "columns.h"
#include "norm_memory.h"

namespace torch_renaissance {
namespace {

// Checks and describes what the kernels read of `matrix`, whose rows are its last dimension.
Columns columns_of(const char* op, const at::Tensor& matrix) {
  const int64_t channels = matrix.dim() == 0 ? 0 : matrix.size(-1);
  const bool halves = matrix.scalar_type() == at::kHalf || matrix.scalar_type() == at::kBFloat16;
  TORCH_CHECK(halves && matrix.is_contiguous() && matrix.numel() > 0 &&
                  channels % kNormVector == 0 && channels <= kMostNormChannels &&
                  matrix.numel() / channels <= kMostNormRows,
              op,
              ": takes contiguous tensors of float16 or bfloat16 whose last dimension is a "
              "multiple of ",
              kNormVector,
              " and at most ",
              kMostNormChannels,
              ", got ",
              matrix.scalar_type(),
              " of shape ",
              matrix.sizes(),
              " with strides ",
              matrix.strides());
  Columns c{};
  c.channels = static_cast<int>(channels);
  c.rows = matrix.numel() / channels;
  c.bfloat16 = matrix.scalar_type() == at::kBFloat16;
  c.input = matrix.const_data_ptr();
  return c;
}

void take_bias(const char* op, Columns& c, const at::Tensor& input, const at::Tensor& bias) {
  TORCH_CHECK(bias.dim() == 1 && bias.size(0) == c.channels && bias.is_contiguous() &&
                  bias.scalar_type() == input.scalar_type() && bias.device() == input.device(),
              op,
              ": bias must be a contiguous tensor of shape [",
              c.channels,
              "] and of input's dtype and device, got ",
              bias.scalar_type(),
              " of shape ",
              bias.sizes());
  c.bias = bias.const_data_ptr();
}

at::Tensor column_sums(const at::Tensor& matrix, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(matrix.dim() == 2, "column_sums: takes a matrix, got shape ", matrix.sizes());
  const at::Tensor x = aligned(matrix);
  Columns c = columns_of("column_sums", x);
  const c10::cuda::CUDAGuard guard(matrix.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::ScalarType found = dtype.value_or(matrix.scalar_type());
  c.float_sums = found == at::kFloat;
  TORCH_CHECK(c.float_sums || found == matrix.scalar_type(),
              "column_sums: sums are of matrix's dtype or float32, got ",
              found);
  at::Tensor sums = at::empty({c.channels}, matrix.options().dtype(found));
  c.sums = sums.mutable_data_ptr();
  const NormTiling tiling = column_tiling(c.rows, c.channels);
  const NormMemory memory(tiling, matrix, stream);
  C10_CUDA_CHECK(column_sums_cuda(c, tiling, memory.pointers, stream));
  return sums;
}

at::Tensor bias_gelu(const at::Tensor& input, const at::Tensor& bias, bool tanh) {
  const at::Tensor x = aligned(input), vector = aligned(bias);
  Columns c = columns_of("bias_gelu", x);
  take_bias("bias_gelu", c, x, vector);
  const c10::cuda::CUDAGuard guard(input.device());
  at::Tensor output = at::empty_like(input);
  c.tanh = tanh;
  c.output = output.mutable_data_ptr();
  const NormTiling tiling = column_tiling(c.rows, c.channels);
  C10_CUDA_CHECK(gelu_cuda(c, tiling, c10::cuda::getCurrentCUDAStream()));
  return output;
}

std::tuple<at::Tensor, at::Tensor> bias_gelu_backward(const at::Tensor& grad,
                                                      const at::Tensor& input,
                                                      const at::Tensor& bias,
                                                      bool tanh) {
  const at::Tensor x = aligned(input), vector = aligned(bias);
  Columns c = columns_of("bias_gelu_backward", x);
  take_bias("bias_gelu_backward", c, x, vector);
  TORCH_CHECK(grad.sizes() == input.sizes() && grad.scalar_type() == input.scalar_type() &&
                  grad.device() == input.device(),
              "bias_gelu_backward: grad must be like input, got ",
              grad.scalar_type(),
              " of shape ",
              grad.sizes());
  const c10::cuda::CUDAGuard guard(input.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  const at::Tensor rows = aligned(grad.contiguous());
  at::Tensor grad_input = at::empty_like(input), grad_bias = at::empty_like(bias);
  c.tanh = tanh;
  c.grad = rows.const_data_ptr();
  c.output = grad_input.mutable_data_ptr();
  c.sums = grad_bias.mutable_data_ptr();
  const NormTiling tiling = column_tiling(c.rows, c.channels);
  const NormMemory memory(tiling, input, stream);
  C10_CUDA_CHECK(gelu_backward_cuda(c, tiling, memory.pointers, stream));
  return {grad_input, grad_bias};
}

std::tuple<at::Tensor, at::Tensor> pack_heads(const at::Tensor& q,
                                              const at::Tensor& k,
                                              const at::Tensor& v) {
  const bool halves = q.scalar_type() == at::kHalf || q.scalar_type() == at::kBFloat16;
  TORCH_CHECK(halves && q.dim() == 4 && q.numel() > 0 && q.size(3) % kNormVector == 0 &&
                  3 * q.size(1) * q.size(3) <= kMostNormChannels &&
                  q.size(0) * q.size(2) <= kMostNormRows,
              "pack_heads: takes float16 or bfloat16 of shape [batch, heads, length, size], size a "
              "multiple of ",
              kNormVector,
              " and 3 * heads * size at most ",
              kMostNormChannels,
              ", got ",
              q.scalar_type(),
              " of shape ",
              q.sizes());
  const c10::cuda::CUDAGuard guard(q.device());
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  Heads h{};
  h.batch = static_cast<int>(q.size(0));
  h.heads = static_cast<int>(q.size(1));
  h.length = static_cast<int>(q.size(2));
  h.size = static_cast<int>(q.size(3));
  h.bfloat16 = q.scalar_type() == at::kBFloat16;
  std::array<at::Tensor, 3> parts{q, k, v};
  for (int i = 0; i < 3; ++i) {
    at::Tensor& part = parts[i];
    TORCH_CHECK(part.sizes() == q.sizes() && part.scalar_type() == q.scalar_type() &&
                    part.device() == q.device(),
                "pack_heads: queries, keys and values must be alike, got shapes ",
                q.sizes(),
                " and ",
                part.sizes());
    const auto in_vectors = [](int64_t stride) { return stride % kNormVector == 0; };
    const bool fits = part.stride(3) == 1 && is_aligned(part) && in_vectors(part.stride(0)) &&
                      in_vectors(part.stride(1)) && in_vectors(part.stride(2));
    if (!fits) part = part.clone(at::MemoryFormat::Contiguous);
    h.parts[i] = part.const_data_ptr();
    for (int d = 0; d < 3; ++d) h.strides[i][d] = part.stride(d);
  }
  const int channels = 3 * h.heads * h.size;
  at::Tensor packed = q.new_empty({q.size(0), q.size(2), channels});
  at::Tensor sums = q.new_empty({channels});
  h.packed = packed.mutable_data_ptr();
  h.sums = sums.mutable_data_ptr();
  const NormTiling tiling = column_tiling(int64_t{h.batch} * h.length, channels);
  const NormMemory memory(tiling, q, stream);
  C10_CUDA_CHECK(pack_heads_cuda(h, tiling, memory.pointers, stream));
  return {packed, sums};
}

}  // namespace

TORCH_LIBRARY_IMPL(torch_renaissance, CUDA, m) {
  m.impl("column_sums", column_sums);
  m.impl("pack_heads", pack_heads);
  m.impl("bias_gelu", bias_gelu);
  m.impl("bias_gelu_backward", bias_gelu_backward);
}

}  // namespace torch_renaissance
