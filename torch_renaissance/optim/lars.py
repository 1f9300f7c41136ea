# SPDX-License-Identifier: BSD-3-Clause
"""LARS; the formula is csrc/math/lars.h, and `_ForLoop` for what the kernels leave alone."""

from weakref import ref

import torch
from torch import Tensor

from ..regions import Plane
from ._fused import Fused, module_groups
from ._rule import Options, Rule

_LEAST_NORM = 1e-12  # as in csrc/math/lars.h


def _needed(group: dict) -> tuple[str, ...]:
    return ("momentum_buffer",) if group["momentum"] != 0 else ()


class _ForLoop(torch.optim.Optimizer):
    """The same step in torch's own operations, tensor by tensor."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.grad.layout != torch.strided:
                    raise RuntimeError(
                        f"LARS does not support gradients of layout {p.grad.layout}; use dense ones"
                    )
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, p.grad, group)

    def _update(self, p: Tensor, grad: Tensor, group: dict) -> None:
        wide = torch.promote_types(p.dtype, torch.float64)
        w, g = p.to(wide), grad.to(wide)
        lr, momentum = group["lr"], group["momentum"]
        weight = 1.0 if group.get("bias_like") else _trust_ratio(w.norm(), g.norm(), group)
        inside = group["lr_in_velocity"]
        g = (-g if group["maximize"] else g) + group["weight_decay"] * w
        g = g * (weight * lr if inside else weight)
        if momentum != 0:
            state = self.state[p]
            if state.get("momentum_buffer") is None:
                state["momentum_buffer"] = torch.zeros_like(p)
            velocity = momentum * state["momentum_buffer"].to(wide) + g
            state["momentum_buffer"].copy_(velocity)
            g = momentum * velocity + g if group["nesterov"] else velocity
        p.copy_(w - (g if inside else lr * g))


def _trust_ratio(weight_norm: Tensor, grad_norm: Tensor, group: dict) -> Tensor:
    denominator = grad_norm + group["weight_decay"] * weight_norm + group["eps"]
    ratio = (group["trust_coefficient"] * weight_norm / denominator).clamp(
        max=group["max_trust_ratio"]
    )
    small = (weight_norm < _LEAST_NORM) | (grad_norm < _LEAST_NORM)
    return torch.where(small, torch.ones_like(ratio), ratio)


class LARS(Fused, torch.optim.Optimizer):
    """Layer-wise adaptive rate scaling (https://arxiv.org/abs/1708.03888) as three launches for all
    tensors and groups of a device and dtype: norms of chunks, norms of tensors, update.

    For each weight tensor w with gradient g, in float32 (float64 for float64; norms in float64):

        ratio = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps)
        m = momentum * m + lr * ratio * (g + weight_decay * w)      # m starts at zero
        w = w - m                                                   # nesterov: see below

    `ratio` is at most `max_trust_ratio`, and 1 where |w| or |g| is below 1e-12. |g| is that of the
    gradient as it is applied: unscaled, averaged over micro-batches, clipped to `max_grad_norm`.
    With `nesterov`, w = w - (momentum * m + lr * ratio * (g + weight_decay * w)) instead, with the
    new m. Without momentum there is no state.

    Bias-like parameters (biases and norm layers' parameters where the module is known, from
    `params` or `tr.accelerate`; else those with `ndim <= 1`) have neither ratio nor decay, as the
    paper's experiments and the field have it; `tr.accelerate(decay_bias_like=True)` doesn't change
    that.

    lr stands inside of the velocity, as in the paper: a new lr reaches only gradients that come
    after it. With `lr_in_velocity=False`, m = momentum * m + ratio * (g + weight_decay * w) and
    w = w - lr * m, as in torch.optim.SGD and timm's Lars: a new lr reaches the whole velocity. With
    a constant lr both move alike. timm's takes the ratio of every tensor in a group with a decay
    (or always_adapt) and of none without, and doesn't bound it. 16-bit parameters have a 16-bit
    velocity, of which less is lost to underflow with `lr_in_velocity=False`.

    Squares are summed in float64, so norms are right for all float32 values; float64 gradients with
    a norm above 1e154 count as infinite. Steps are right down to lr * ratio = 1e-49, where a
    gradient is some 1e40 times as large as its weight.

    Args:
        params: parameters, param groups, or an `nn.Module`, whose weights become one group and
            whose bias-like parameters another.
        lr: learning rate, a number or a tensor of one element.
        momentum: of the velocity.
        weight_decay: added to the gradient, times the weight, and to the ratio's denominator.
        trust_coefficient: how far a weight moves at lr = 1, as a fraction of its norm.
        eps: added to the ratio's denominator.
        nesterov: look ahead by one step of the velocity.
        max_trust_ratio: bound on the ratio; `math.inf` for none.
        maximize: ascend instead of descend.
        lr_in_velocity: where lr stands, see above.

    Raises:
        ValueError: for a negative value, a `trust_coefficient` or `max_trust_ratio` of 0, an lr of
            more than one element, or `nesterov` without momentum; of a param group as well.
    """

    _rule = Rule("lars", {"momentum_buffer": Plane.M}, _needed, shows_step=False, adapts=True)
    _native = _ForLoop

    def __init__(
        self,
        params,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0,
        *,
        trust_coefficient: float = 0.001,
        eps: float = 0,
        nesterov: bool = False,
        max_trust_ratio: float = 100,
        maximize: bool = False,
        lr_in_velocity: bool = True,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "max_trust_ratio": max_trust_ratio,
            "maximize": maximize,
            "lr_in_velocity": lr_in_velocity,
        }
        _check(defaults)
        groups, known = module_groups(params)
        super().__init__(groups, defaults)
        self._model = ref(params) if known else None
        self._options = Options(known=known, model=self._model)

    def add_param_group(self, param_group: dict) -> None:
        """As torch.optim.Optimizer.add_param_group.

        Raises:
            ValueError: for values that the constructor refuses.
        """
        if isinstance(param_group, dict):
            _check({**self.defaults, **param_group})
        super().add_param_group(param_group)

    def __setstate__(self, state: dict) -> None:
        defaults = state.get("defaults") or self.defaults  # another optimizer's groups lack some
        for group in state["param_groups"]:
            for key, value in defaults.items():
                group.setdefault(key, value)
        super().__setstate__(state)

    def trust_ratios(self) -> dict[str, Tensor]:
        """The trust ratio that each weight had when it was last updated, by name: 0-dim float32
        tensors on its device, which keep their value; nothing waits for the device.

        Names are the module's where it is known. A weight that has no gradient yet, or whose every
        step was skipped, has NaN or isn't there; bias-like parameters, and those left to torch's
        operations (`tr.regions` lists them), aren't there either.
        """
        return self._current_plan().trust_ratios()


def _check(values: dict) -> None:
    lr = values["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"LARS: a tensor as lr must have one element, got shape {list(lr.shape)}")
    for name in ("lr", "momentum", "weight_decay", "eps"):
        if not values[name] >= 0:
            raise ValueError(f"LARS: {name} must be >= 0, got {values[name]}")
    for name in ("trust_coefficient", "max_trust_ratio"):
        if not values[name] > 0:
            raise ValueError(f"LARS: {name} must be > 0, got {values[name]}")
    if values["nesterov"] and values["momentum"] == 0:
        raise ValueError("LARS: nesterov needs a momentum, got momentum=0")
