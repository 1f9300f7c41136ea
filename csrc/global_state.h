// SPDX-License-Identifier: BSD-3-Clause
// The switches of this thread and process that a captured step depends on.
#pragma once

#include <ATen/Context.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include <array>
#include <iterator>
#include <string>
#include <type_traits>

#include "autocast.h"

namespace torch_renaissance {
namespace py = pybind11;

namespace switches {

inline std::string on_off(int64_t value) { return value != 0 ? "on" : "off"; }

inline std::string dtype_name(int64_t value) {
  return torch::getTHPDtype(static_cast<c10::ScalarType>(value))->name;
}

inline std::string number(int64_t value) { return std::to_string(value); }

inline std::string precision_name(int64_t value) {
  constexpr const char* kNames[] = {"none", "ieee", "tf32", "bf16", "default"};
  return value < 5 ? kNames[value] : number(value);
}

// The numbers that torch gives them.
enum class Float32Backend { kCuda = 1, kMkldnn };
enum class Float32Op { kConv = 1, kRnn, kMatmul };

// Never raises, unlike allowTF32CuBLAS() and its like where torch's old and new switches were
// mixed. Before torch 2.10 the enums are strings.
template <typename Precision, typename Backend, typename Op>
int64_t float32_precision(Precision (at::Context::*read)(Backend, Op) const,
                          Float32Backend backend,
                          Float32Op op) {
  const at::Context& context = at::globalContext();
  if constexpr (std::is_enum_v<Precision>) {
    return static_cast<int64_t>(
        (context.*read)(static_cast<Backend>(backend), static_cast<Op>(op)));
  } else {
    static const std::string kBackends[] = {"generic", "cuda", "mkldnn"};
    static const std::string kOps[] = {"all", "conv", "rnn", "matmul"};
    const auto name =
        (context.*read)(kBackends[static_cast<int>(backend)], kOps[static_cast<int>(op)]);
    int64_t value = 0;
    while (value < 4 && precision_name(value) != name) ++value;
    return value;
  }
}

template <Float32Backend backend, Float32Op op>
int64_t float32() {
  return float32_precision(&at::Context::float32Precision, backend, op);
}

template <bool (at::Context::*read)() const>
int64_t context() {
  return (at::globalContext().*read)();
}

template <auto read>
int64_t context_enum() {
  return static_cast<int64_t>((at::globalContext().*read)());
}

template <c10::DeviceType device>
int64_t autocast() {
  return at::autocast::is_autocast_enabled(device);
}

template <c10::DeviceType device>
int64_t autocast_dtype() {
  return static_cast<int64_t>(at::autocast::get_autocast_dtype(device));
}

struct Switch {
  const char* name;
  int64_t (*read)();  // a few nanoseconds
  std::string (*text)(int64_t);
};

inline constexpr Switch kAll[] = {
    {"grad mode", [] { return int64_t{c10::GradMode::is_enabled()}; }, on_off},
    {"inference mode", [] { return int64_t{c10::InferenceMode::is_enabled()}; }, on_off},
    {"anomaly mode", [] { return int64_t{torch::autograd::AnomalyMode::is_enabled()}; }, on_off},
    {"autocast on CUDA", autocast<c10::kCUDA>, on_off},
    {"autocast's dtype on CUDA", autocast_dtype<c10::kCUDA>, dtype_name},
    {"autocast on the CPU", autocast<c10::kCPU>, on_off},
    {"autocast's dtype on the CPU", autocast_dtype<c10::kCPU>, dtype_name},
    {"autocast's cache", [] { return int64_t{at::autocast::is_autocast_cache_enabled()}; }, on_off},
    {"the default dtype",
     [] { return static_cast<int64_t>(c10::get_default_dtype_as_scalartype()); },
     dtype_name},
    {"the number of torch function modes", at::impl::PythonTorchFunctionTLS::stack_len, number},
    {"the number of torch dispatch modes", c10::impl::TorchDispatchModeTLS::stack_len, number},
    {"use_deterministic_algorithms", context<&at::Context::deterministicAlgorithms>, on_off},
    {"its warn_only", context<&at::Context::deterministicAlgorithmsWarnOnly>, on_off},
    {"deterministic.fill_uninitialized_memory",
     context<&at::Context::deterministicFillUninitializedMemory>,
     on_off},
    {"cudnn.enabled", context<&at::Context::userEnabledCuDNN>, on_off},
    {"cudnn.benchmark", context<&at::Context::benchmarkCuDNN>, on_off},
    {"cudnn.deterministic", context<&at::Context::deterministicCuDNN>, on_off},
    {"float32 precision of CUDA matmul",
     float32<Float32Backend::kCuda, Float32Op::kMatmul>,
     precision_name},
    {"float32 precision of cuDNN conv",
     float32<Float32Backend::kCuda, Float32Op::kConv>,
     precision_name},
    {"float32 precision of cuDNN rnn",
     float32<Float32Backend::kCuda, Float32Op::kRnn>,
     precision_name},
    {"float32 precision of CPU matmul",
     float32<Float32Backend::kMkldnn, Float32Op::kMatmul>,
     precision_name},
    {"float16 reduction in cuBLAS", context_enum<&at::Context::allowFP16ReductionCuBLAS>, number},
    {"bfloat16 reduction in cuBLAS", context_enum<&at::Context::allowBF16ReductionCuBLAS>, number},
    {"float16 accumulation in cuBLAS", context<&at::Context::allowFP16AccumulationCuBLAS>, on_off},
    {"flash attention", context<&at::Context::userEnabledFlashSDP>, on_off},
    {"memory-efficient attention", context<&at::Context::userEnabledMemEfficientSDP>, on_off},
    {"cuDNN attention", context<&at::Context::userEnabledCuDNNSDP>, on_off},
    {"math attention", context<&at::Context::userEnabledMathSDP>, on_off},
};

}  // namespace switches

class GlobalState {
 public:
  GlobalState() {
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = switches::kAll[i].read();
  }

  bool fits() const { return changed() == values_.size(); }

  // As in "grad mode was on, is off", or None.
  py::object difference() const {
    const size_t i = changed();
    if (i == values_.size()) return py::none();
    const switches::Switch& s = switches::kAll[i];
    return py::str(s.name + (" was " + s.text(values_[i])) + ", is " + s.text(s.read()));
  }

 private:
  // The first switch that is no longer as it was.
  size_t changed() const {
    size_t i = 0;
    while (i < values_.size() && switches::kAll[i].read() == values_[i]) ++i;
    return i;
  }

  std::array<int64_t, std::size(switches::kAll)> values_;
};

}  // namespace torch_renaissance
