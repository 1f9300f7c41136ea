# SPDX-License-Identifier: BSD-3-Clause
"""In a capture: gradients of weights on a branch of the graph, beside the rest of backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import zip_longest
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from ._low import LowWeights
from ._ops import _C

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class WeightGradients:
    """For a captured forward and backward. Of a layer, backward computes the gradient of the input,
    for which the layer before waits, and that of the weight, for which only the update does. Torch
    computes one after the other; here the latter is put on a branch of the graph. The kernels are
    the same ones, and so are their results, but for a convolution's bias: a kernel of ours adds it,
    to the same bits, and where batch norm follows, its gradient comes with batch norm's.

    It is done for Linear and Conv with 16-bit copies of their weights, each used once, so that no
    kernel on the main branch touches a gradient before the branches join. Not for layers that read
    more than `LARGEST` bytes, whose kernels fill the device by themselves and get into each other's
    way: on an H200 a ResNet-50 with a batch of 32 loses 6 % with convolutions of up to 4 MiB, while
    a small GPT gains 17 % with linear layers of that size. What the other branch reads is kept
    until they join, `MOST_KEPT` bytes at most.

    Args:
        weights: what stands in for the modules' parameters within the block.
        branch: `Pool.branch`, not entered yet; None leaves everything to torch.
    """

    LARGEST: ClassVar[dict[str, int]] = {"linear": 4 << 20, "conv": 1 << 20}
    MOST_KEPT = 64 << 20

    def __init__(self, weights: LowWeights, branch: AbstractContextManager | None):
        self._weights, self._branch = weights, branch
        self._stack = ExitStack()
        self._put: Callable[..., None]
        self._modules: list[nn.Module] = []
        self._stand_ins: dict[int, Tensor] = {}
        self._single: set[int] = set()  # ids of stand-ins with one use; of none until that is known
        self._forward_is_done = False
        self._kept: dict[int, Tensor] = {}  # by where their memory begins

    def __enter__(self) -> WeightGradients:
        stand_ins = self._weights.stand_ins()
        if self._branch is None or not stand_ins:
            return self
        self._put = self._stack.enter_context(self._branch)
        self._stand_ins = {id(t): t for t in stand_ins}
        for module in self._weights.modules():
            if type(module).forward is nn.Linear.forward:
                vars(module)["forward"] = partial(self._linear, module)
            elif type(module).forward in [kind.forward for kind in _CONVS]:
                vars(module)["forward"] = partial(self._conv, module)
            else:
                continue
            self._modules.append(module)
        return self

    def __exit__(self, *error) -> None:
        for module in self._modules:
            del vars(module)["forward"]
        self._single.clear()
        self._stack.__exit__(*error)  # the branches join
        self._kept.clear()

    def look(self, loss: Tensor) -> None:
        """Before backward: which weights are used once."""
        self._forward_is_done = True
        if not self._modules or loss.grad_fn is None:
            return
        nodes = {t.grad_fn: name for name, t in self._stand_ins.items()}
        # Where their gradients end: whatever leads there besides uses the parameter itself.
        nodes |= {node.next_functions[0][0]: name for node, name in nodes.items()}
        uses: Counter[int] = Counter()
        seen, waiting = set(), [loss.grad_fn]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if isinstance(node, BackwardCFunction) and type(node)._forward_cls not in _OURS:
                return  # it may run a backward of its own, as reentrant checkpoints do
            for following, _ in node.next_functions:
                if following in nodes:
                    uses[nodes[following]] += 1
                elif following is not None:
                    waiting.append(following)
        self._single = {name for name, n in uses.items() if n == 1}

    def wanted(self, names: tuple[int, ...], needed: tuple[bool, ...]) -> list[bool]:
        """Which gradients of the weight and the bias a backward asks for: one within `loss_fn`
        may want others only, and torch's own nodes know that."""
        if self._forward_is_done:
            return list(needed)
        nodes = [self._stand_ins[name].grad_fn for name in names]
        asked = [torch._C._will_engine_execute_node(node) for node in nodes]
        return [need and ask for need, ask in zip_longest(needed, asked, fillvalue=False)]

    def aside(
        self, kind: str, work: Callable[[], tuple], names: tuple[int, ...], reads: tuple
    ) -> tuple:
        """`work()`, the gradients of the weight and the bias called `names`, from `reads`; on the
        other branch where that can be."""
        kept = self._kept | {t.untyped_storage().data_ptr(): t for t in reads}
        if (
            torch.is_grad_enabled()
            or not self._single.issuperset(names)
            or sum(t.nbytes for t in reads) > self.LARGEST[kind]
            or sum(t.untyped_storage().nbytes() for t in kept.values()) > self.MOST_KEPT
        ):
            return work()
        self._kept = kept
        found: list[Tensor | None] = []

        def fitted() -> None:
            # Autograd copies gradients of other strides than the parameter's, without waiting.
            for t, name in zip_longest(work(), names):
                like = self._stand_ins.get(name)
                fits = t is None or t.stride() == like.stride()
                found.append(t if fits else torch.empty_like(like).copy_(t))

        self._put(fitted)
        return tuple(found)

    def _linear(self, module: nn.Linear, input: Tensor) -> Tensor:
        weight, bias = _copies(module)
        if not self._takes(input, weight, bias):
            return nn.Linear.forward(module, input)
        return _Linear.apply(input.to(weight.dtype), weight, bias, self, _names(weight, bias))

    def _conv(self, module: nn.Conv2d, input: Tensor) -> Tensor:
        weight, bias = _copies(module)
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        if not plain or not self._takes(input, weight, bias) or input.dim() != weight.dim():
            return type(module).forward(module, input)
        where = module.stride, module.padding, module.dilation, False, module.output_padding
        how = *where, module.groups
        return _Conv.apply(input.to(weight.dtype), weight, bias, self, _names(weight, bias), how)

    def _takes(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
        """Whether autocast would compute this in 16 bits, and torch's own backward alone."""
        return (
            all(name in self._stand_ins for name in _names(weight, bias))
            and type(x) in (Tensor, nn.Parameter)
            and x.device == weight.device
            and x.is_floating_point()
            and x.dtype != torch.float64
            and torch.is_grad_enabled()
            and torch.is_autocast_enabled(x.device.type)
            and not torch._C._are_functorch_transforms_active()
        )


def _copies(module: nn.Module) -> tuple[Tensor | None, Tensor | None]:
    """Not as attributes, which a parametrization computes anew at each look."""
    return module._parameters.get("weight"), module._parameters.get("bias")


def _names(weight: Tensor | None, bias: Tensor | None) -> tuple[int, ...]:
    return (id(weight),) if bias is None else (id(weight), id(bias))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, beside, names):
        ctx.save_for_backward(x, weight)
        ctx.beside, ctx.names = beside, names
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.beside.wanted(ctx.names, ctx.needs_input_grad[1:3])
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])

        def weights() -> tuple:
            # In the layout of the weight, as torch's own.
            found: list[Tensor | None] = [None, None]
            if of_weight and weight.t().is_contiguous() and not weight.is_contiguous():
                found[0] = inputs.t().mm(rows).t()
            elif of_weight:
                found[0] = rows.t().mm(inputs)
            if of_bias:
                found[1] = rows.sum(0)
            return tuple(found)

        found = ctx.beside.aside("linear", weights, ctx.names, (inputs, rows))
        of_x = rows.mm(weight).view(x.shape) if ctx.needs_input_grad[0] else None
        return of_x, *found, None, None


def _adds_bias_last(x: Tensor, weight: Tensor, bias_sizes: list[int], how: tuple) -> bool:
    """Whether torch adds the bias to the output of a convolution without one, rounded."""
    if not x.is_cuda:
        return False
    backend = torch._C._select_conv_backend(x, weight, None, *how, bias_sizes)
    return backend == torch._C._ConvBackend.Cudnn


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, beside, names, how):
        ctx.save_for_backward(x, weight)
        ctx.beside, ctx.names, ctx.how = beside, names, how
        ctx.bias_sizes = None if bias is None else list(bias.shape)
        if bias is None or not _adds_bias_last(x, weight, ctx.bias_sizes, how):
            return torch.convolution(x, weight, bias, *how)
        found = torch.convolution(x, weight, None, *how)
        # Torch's kernel for it is for any layout, and takes three times as long.
        if not _C.add_channel_bias(found, bias):
            found += bias.view(-1, *[1] * (found.dim() - 2))
        return found

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        wanted = ctx.beside.wanted(ctx.names, ctx.needs_input_grad[1:3])

        def gradients(*mask: bool) -> tuple:
            if not any(mask):
                return None, None, None
            return torch.ops.aten.convolution_backward(
                grad, x, weight, ctx.bias_sizes, *ctx.how, list(mask)
            )

        def weights() -> tuple:
            of_weight, of_bias = wanted
            of_norm = _C.take_bias_grad(grad) if of_bias else None
            found = gradients(False, of_weight, of_bias and of_norm is None)
            return found[1], found[2] if of_norm is None else of_norm

        found = ctx.beside.aside("conv", weights, ctx.names, (grad, x))
        of_x = gradients(ctx.needs_input_grad[0], False, False)[0]
        return of_x, *found, None, None, None


_OURS = (_Linear, _Conv)
