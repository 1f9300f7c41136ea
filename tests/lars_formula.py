# SPDX-License-Identifier: BSD-3-Clause
# What the tests of LARS share: its formula in float64, options and bounds.

import pytest
import torch
from testing import DEVICES

each_device = pytest.mark.parametrize("device", DEVICES)
TRUST = {"lr": 0.5, "trust_coefficient": 0.02}
# A step rounds some five times at 6e-8: 100 of them stay below 3e-5 even if all err the same way.
FP32 = 3e-5


class Formula:
    """LARS as its docstring has it, in float64; storage is rounded to `dtype` after each step."""

    def __init__(self, params, dtype=torch.float64, bias_like=None, **options):
        self.w = [p.detach().double().cpu() for p in params]
        self.m = [torch.zeros_like(w) for w in self.w]
        self.dtype, self.bias_like = dtype, bias_like or [w.ndim <= 1 for w in self.w]
        self.options = {
            "momentum": 0.9,
            "weight_decay": 0.0,
            "trust_coefficient": 0.001,
            "eps": 0.0,
            "nesterov": False,
            "max_trust_ratio": 100.0,
            "maximize": False,
            "lr_in_velocity": True,
        } | options

    def ratio(self, i, grad):
        o, w = self.options, self.w[i].norm()
        if self.bias_like[i] or w < 1e-12 or grad.norm() < 1e-12:
            return 1.0
        ratio = o["trust_coefficient"] * w / (grad.norm() + o["weight_decay"] * w + o["eps"])
        return min(float(ratio), o["max_trust_ratio"])

    def step(self, grads, **changes):
        self.options |= changes
        o = self.options
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            grad = grad.double().cpu()
            decay = 0.0 if self.bias_like[i] else o["weight_decay"]
            g = (-grad if o["maximize"] else grad) + decay * self.w[i]
            g = g * self.ratio(i, grad) * (o["lr"] if o["lr_in_velocity"] else 1.0)
            m = self.m[i] = o["momentum"] * self.m[i] + g
            move = o["momentum"] * m + g if o["nesterov"] else m
            self.w[i] = self.w[i] - move * (1.0 if o["lr_in_velocity"] else o["lr"])
            self.w[i], self.m[i] = (t.to(self.dtype).double() for t in (self.w[i], self.m[i]))


def grads_of(params):
    return [None if p.grad is None else p.grad.clone() for p in params]


def cpu(tensors):
    return [t.detach().cpu() for t in tensors]
