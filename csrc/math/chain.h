// SPDX-License-Identifier: BSD-3-Clause
// What a step does to all gradients before the update: unscaling and the life of the loss scale
// (torch.amp.GradScaler), clipping (torch.nn.utils.clip_grad_norm_), averaging over micro-batches.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace torch_renaissance {

// Set by the host, in the last row of the table of hyper-parameters.
enum ControlColumn : int {
  kMaxNorm,  // infinity: no clipping
  kEmaDecay,
  kGrowthFactor,
  kBackoffFactor,
  kGrowthInterval,
  kMicroBatches,  // whose gradients were summed; their mean is what counts
  kControlColumns,
};

// Found by the norm pass, on the device.
enum ChainResult : int {
  kMultiplier,  // of every gradient
  kFoundInf,
  kGradNorm,
  kSumOfSquares,
  kNonFinite,
  kChainResults,
};

// A scaled gradient times this is the gradient. The reciprocal is rounded as GradScaler's is.
TR_HOST_DEVICE double unscale_factor(const double* control, const float* scale) {
  const double inverse = scale != nullptr ? static_cast<float>(1.0 / *scale) : 1.0;
  return inverse / control[kMicroBatches];
}

// at::_amp_update_scale_: back off after a non-finite gradient, grow after `interval` good steps,
// never to infinity.
TR_HOST_DEVICE void update_loss_scale(const double* control,
                                      bool found_inf,
                                      float* scale,
                                      int32_t* growth_tracker) {
  if (found_inf) {
    *scale = static_cast<float>(*scale * control[kBackoffFactor]);
    *growth_tracker = 0;
  } else if (*growth_tracker + 1 == static_cast<int32_t>(control[kGrowthInterval])) {
    const auto grown = static_cast<float>(*scale * control[kGrowthFactor]);
    if (std::isfinite(grown)) *scale = grown;
    *growth_tracker = 0;
  } else {
    *growth_tracker += 1;
  }
}

// clip_grad_norm_'s coefficient, in torch's dtype of the norm.
template <typename T>
TR_HOST_DEVICE double clip_coefficient(double max_norm, double norm) {
  if (std::isinf(max_norm)) return 1;
  const T coefficient = static_cast<T>(max_norm) / (static_cast<T>(norm) + T(1e-6));
  return coefficient > T(1) ? T(1) : coefficient;  // NaN stays
}

// Of every gradient, of which `unscale` is the part that doesn't depend on their norm.
TR_HOST_DEVICE double multiplier_of(double unscale, double max_norm, double norm, bool wide) {
  return unscale * (wide ? clip_coefficient<double>(max_norm, norm)
                         : clip_coefficient<float>(max_norm, norm));
}

// Clipping alone lets what isn't finite through, as torch's does.
TR_HOST_DEVICE bool skips(bool finite, const float* loss_scale) {
  return loss_scale != nullptr && !finite;
}

// Turns the sums over all gradients into what the update needs. `loss_scale` is ours and may be
// null; by GradScaler's the update divides itself. `wide`: norms are float64.
TR_HOST_DEVICE void finish_chain(const double* control,
                                 double sum_of_squares,
                                 bool finite,
                                 bool wide,
                                 float* loss_scale,
                                 int32_t* growth_tracker,
                                 double* chain) {
  const double norm = std::sqrt(sum_of_squares);
  const bool found_inf = skips(finite, loss_scale);
  chain[kMultiplier] =
      multiplier_of(unscale_factor(control, loss_scale), control[kMaxNorm], norm, wide);
  chain[kFoundInf] = found_inf;
  chain[kGradNorm] = wide ? norm : static_cast<float>(norm);
  if (loss_scale != nullptr) update_loss_scale(control, found_inf, loss_scale, growth_tracker);
}

}  // namespace torch_renaissance
