// SPDX-License-Identifier: BSD-3-Clause
// The table of hyper-parameters as the host knows it: read from param_groups at every step.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "backend.h"
#include "math/chain.h"
#include "math/hyper.h"
#include "python_objects.h"
#include "update.h"

namespace torch_renaissance {

static_assert(int{kControlColumns} <= int{kHyperColumns}, "the control row is a row of the table");

// What TrainStep's or GradScaler's loss scale hands to a step. Tensors live on the device.
struct LossScale {
  at::Tensor scale, growth_tracker;
  double growth_factor = 2, backoff_factor = 0.5, growth_interval = 2000;

  // Of a tuple of these five, or None.
  static std::optional<LossScale> from(const py::object& o) {
    if (o.is_none()) return std::nullopt;
    const auto t = py::cast<py::tuple>(o);
    return LossScale{unpack(py::object(t[0]).ptr()),
                     unpack(py::object(t[1]).ptr()),
                     t[2].cast<double>(),
                     t[3].cast<double>(),
                     t[4].cast<double>()};
  }
};

class HyperRows {
 public:
  explicit HyperRows(Rule rule) : rule_(rule) {}

  // What a function of the step in `ema_decay` is called with: steps done.
  int64_t ema_calls = 0;

  // `lr_device`: where the kernels run, if that is one place; a scalar there is read by them.
  void read(PyObject* param_groups, std::optional<c10::Device> lr_device) {
    static PyObject *const lr = name("lr"), *const weight_decay = name("weight_decay"),
                           *const momentum = name("momentum"), *const dampening = name("dampening"),
                           *const nesterov = name("nesterov"), *const betas = name("betas"),
                           *const eps = name("eps"), *const amsgrad = name("amsgrad"),
                           *const maximize = name("maximize"),
                           *const decoupled = name("decoupled_weight_decay"),
                           *const trust_coefficient = name("trust_coefficient"),
                           *const max_trust_ratio = name("max_trust_ratio"),
                           *const lr_in_velocity = name("lr_in_velocity");
    const Py_ssize_t groups = PyList_GET_SIZE(param_groups);
    rows.assign((2 * groups + 1) * kHyperColumns, 0.0);
    planes_needed.assign(groups, 0);
    for (Py_ssize_t g = 0; g < groups; ++g) {
      PyObject* group = PyList_GET_ITEM(param_groups, g);
      double* row = rows.data() + 2 * g * kHyperColumns;
      PyObject* rate = get(group, lr);
      if (read_on_device(rate, lr_device)) {
        row[kLrPointer] =
            static_cast<double>(reinterpret_cast<uintptr_t>(unpack(rate).const_data_ptr()));
        row[kLrIsDouble] = unpack(rate).scalar_type() == at::kDouble;
      } else {
        row[kLr] = number(rate);
      }
      row[kWeightDecay] = number(get(group, weight_decay));
      int flags = 0;
      flags |= truth(group, maximize) ? kMaximize : 0;
      flags |= truth(group, decoupled) ? kDecoupled : 0;
      if (rule_ == Rule::kAdam) {
        const py::object pair = py::reinterpret_borrow<py::object>(get(group, betas));
        row[kBeta1] = number(py::object(pair[py::int_(0)]).ptr());
        row[kBeta2] = number(py::object(pair[py::int_(1)]).ptr());
        row[kLogBeta1] = std::log(row[kBeta1]);
        row[kLogBeta2] = std::log(row[kBeta2]);
        row[kEps] = number(get(group, eps));
        flags |= truth(group, amsgrad) ? kAmsgrad : 0;
        planes_needed[g] = (flags & kAmsgrad) != 0 ? 3 : 2;
      } else {
        row[kBeta1] = number(get(group, momentum));
        flags |= truth(group, nesterov) ? kNesterov : 0;
        planes_needed[g] = row[kBeta1] != 0 ? 1 : 0;
        if (rule_ == Rule::kLars) {
          row[kBeta2] = number(get(group, trust_coefficient));
          row[kLogBeta1] = number(get(group, max_trust_ratio));
          row[kEps] = number(get(group, eps));
          flags |= kTrust | (truth(group, lr_in_velocity) ? kLrInVelocity : 0);
        } else {
          row[kBeta2] = number(get(group, dampening));
        }
      }
      row[kFlags] = flags;
      std::copy(row, row + kHyperColumns, row + kHyperColumns);
      row[kHyperColumns + kWeightDecay] = 0;
      row[kHyperColumns + kFlags] = flags & ~kTrust;
    }
  }

  // What torch's for-loop form refuses, and its fused one takes for infinite. `narrow`: groups
  // whose parameters are computed in float32.
  void refuse_overflow(PyObject* param_groups, const std::vector<bool>& narrow) const {
    static PyObject* const fused = name("fused");
    for (size_t g = 0; g < narrow.size(); ++g) {
      const double* row = rows.data() + 2 * g * kHyperColumns;
      const bool couples = (static_cast<int>(row[kFlags]) & kDecoupled) == 0;
      const bool lr = overflows(row[kLr]), decay = couples && overflows(row[kWeightDecay]);
      if (!narrow[g] || !(lr || decay)) continue;
      TORCH_CHECK(truth(PyList_GET_ITEM(param_groups, g), fused),
                  "param_groups[",
                  g,
                  lr ? "]['lr'] is " : "]['weight_decay'] is ",
                  lr ? row[kLr] : row[kWeightDecay],
                  ", more than float32 holds, in which its parameters are updated; choose a "
                  "smaller one");
    }
  }

  // The last row, of what the whole step shares. Returns whether gradients are to be clipped.
  bool read_control(const py::dict& own,
                    const std::optional<LossScale>& scale,
                    int64_t micro_batches,
                    bool averages) {
    static PyObject *const max_grad_norm = name("max_grad_norm"), *const decay = name("ema_decay");
    double* row = rows.data() + rows.size() - kHyperColumns;
    PyObject* most = find(own.ptr(), max_grad_norm);
    row[kMaxNorm] = most != nullptr ? number(most) : std::numeric_limits<double>::infinity();
    row[kMicroBatches] = static_cast<double>(micro_batches);
    if (scale) {
      row[kGrowthFactor] = scale->growth_factor;
      row[kBackoffFactor] = scale->backoff_factor;
      row[kGrowthInterval] = scale->growth_interval;
    }
    PyObject* rate = averages ? find(own.ptr(), decay) : nullptr;
    if (rate != nullptr && PyCallable_Check(rate)) {
      const py::object value = py::reinterpret_borrow<py::object>(rate)(ema_calls);
      row[kEmaDecay] = number(value.ptr());
    } else {
      row[kEmaDecay] = rate != nullptr ? number(rate) : 1.0;
    }
    TORCH_CHECK_VALUE(row[kEmaDecay] >= 0 && row[kEmaDecay] <= 1,
                      "ema_decay must be in [0, 1], got ",
                      row[kEmaDecay],
                      " for step ",
                      ema_calls);
    return most != nullptr;
  }

  // The values travel as kernel arguments, so the next step may change them at once. A copy made
  // inside a capture hasn't happened yet: what the table holds is then not known.
  void write(at::ArrayRef<at::Tensor> tables) {
    if (rows == written_) return;
    bool captured = false;
    for (const at::Tensor& table : tables) {
      captured = captured || backend_of(table).is_capturing();
      backend_of(table).write(table.data_ptr<double>(), rows, table);
    }
    written_ = rows;
    if (captured) written_.clear();
  }

  void forget() { written_.clear(); }

  std::vector<double> rows;
  std::vector<int> planes_needed;  // by group

 private:
  static bool overflows(double value) {
    return std::isfinite(value) && std::abs(value) > std::numeric_limits<float>::max();
  }

  // A CUDA scalar is read by the kernel, so that nothing waits for it here.
  static bool read_on_device(PyObject* lr, std::optional<c10::Device> device) {
    if (!is_tensor(lr) || !unpack(lr).is_cuda() || unpack(lr).device() != device) return false;
    const at::ScalarType type = unpack(lr).scalar_type();
    return type == at::kFloat || type == at::kDouble;
  }

  const Rule rule_;
  std::vector<double> written_;
};

}  // namespace torch_renaissance
