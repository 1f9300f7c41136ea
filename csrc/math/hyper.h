// SPDX-License-Identifier: BSD-3-Clause
// A table of hyper-parameters: rows of float64, flags kept as whole numbers. Group g has row 2g,
// and row 2g + 1 for those of its tensors that do not decay (under LARS, nor have a trust ratio).
#pragma once

#include <cstdint>

#include "host_device.h"

namespace torch_renaissance {

enum HyperColumn : int {
  kLr,
  kWeightDecay,
  kBeta1,     // Adam: betas[0]; SGD, LARS: momentum
  kBeta2,     // Adam: betas[1]; SGD: dampening; LARS: trust_coefficient
  kLogBeta1,  // their logarithms, so that the device needs exp, not pow; LARS: max_trust_ratio
  kLogBeta2,
  kEps,
  kFlags,
  kLrPointer,  // address of a device scalar that replaces kLr; 0: none. Below 2^53, so a double
               // holds it
  kLrIsDouble,
  kHyperColumns,
};

enum HyperFlag : int {
  kMaximize = 1,
  kDecoupled = 2,
  kNesterov = 4,
  kAmsgrad = 8,
  kTrust = 16,
  kLrInVelocity = 32,
};

struct Hyper {
  double lr, weight_decay, beta1, beta2, log_beta1, log_beta2, eps;
  bool maximize, decoupled, nesterov, amsgrad, trust, lr_in_velocity;
};

TR_HOST_DEVICE Hyper read_hyper(const double* row) {
  const int flags = static_cast<int>(row[kFlags]);
  Hyper h{row[kLr],
          row[kWeightDecay],
          row[kBeta1],
          row[kBeta2],
          row[kLogBeta1],
          row[kLogBeta2],
          row[kEps],
          (flags & kMaximize) != 0,
          (flags & kDecoupled) != 0,
          (flags & kNesterov) != 0,
          (flags & kAmsgrad) != 0,
          (flags & kTrust) != 0,
          (flags & kLrInVelocity) != 0};
  if (row[kLrPointer] != 0) {
    const auto address = reinterpret_cast<const void*>(static_cast<uintptr_t>(row[kLrPointer]));
    h.lr = row[kLrIsDouble] != 0 ? *static_cast<const double*>(address)
                                 : static_cast<double>(*static_cast<const float*>(address));
  }
  return h;
}

}  // namespace torch_renaissance
