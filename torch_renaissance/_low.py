# SPDX-License-Identifier: BSD-3-Clause
"""16-bit weights in the place of parameters, for the time of a step's forward and backward."""

from __future__ import annotations

import sys
from contextlib import ExitStack

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ._ops import _C

# Who uses its parameters as autocast expects it. A subclass with a forward of its own may not.
_FORWARDS = {
    kind.forward
    for kind in (
        nn.Linear,
        *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
        *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        nn.MultiheadAttention,
    )
}
_NAMES = {"weight", "bias", "in_proj_weight", "in_proj_bias"}
_NAMES |= {"q_proj_weight", "k_proj_weight", "v_proj_weight"}


def _takes_low(module: nn.Module) -> bool:
    conv = getattr(type(module), "_conv_forward", None)
    return (
        getattr(type(module), "forward", None) in _FORWARDS  # a ScriptModule's raises
        and "forward" not in vars(module)
        and (conv is None or conv.__module__ == "torch.nn.modules.conv")
    )


def places_of_low(modules: list[nn.Module], dropped: set[nn.Module]) -> list[tuple]:
    """(module, name, parameter) of the float32 parameters that Linear, Conv and attention use
    directly, so that autocast would cast each of them at every step. Those that another kind of
    module uses as well (tied embeddings) keep autocast's way: their gradients come in both dtypes.
    """
    found: list[tuple] = []
    elsewhere: set[Tensor] = set()
    for module in dict.fromkeys(m for root in modules for m in root.modules()):
        takes = _takes_low(module) and module not in dropped
        for name, p in module._parameters.items():
            if p is None:
                continue
            if takes and name in _NAMES:
                found.append((module, name, p))
            else:
                elsewhere.add(p)
    return [
        (module, name, p)
        for module, name, p in found
        if p not in elsewhere and p.dtype == torch.float32 and type(p) is nn.Parameter
    ]


def same_places(some: list[tuple], others: list[tuple]) -> bool:
    """By identity: two tensors have no truth value to compare."""
    return [tuple(map(id, place)) for place in some] == [tuple(map(id, p)) for p in others]


# What may be asked of a 16-bit weight. All else would compute with rounded values, or write to
# them, where natively it has the parameter.
_KERNELS = {
    torch.nn.functional.linear,
    *(torch.conv1d, torch.conv2d, torch.conv3d),
    *(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d),
    torch.nn.functional.multi_head_attention_forward,
}
_QUESTIONS = {"dim", "ndimension", "size", "stride", "numel", "nelement", "element_size"}
_QUESTIONS |= {"storage_offset", "is_contiguous", "is_floating_point", "is_complex", "get_device"}
_QUESTIONS |= {"is_same_size", "is_pinned", "__len__", "__hash__"}
_VALUES = {".data", ".T", ".mT", ".H", ".mH", ".real", ".imag"}  # of the attributes


class ReadsWeight(Exception):
    """Something besides Linear, Conv and attention wants the values of weights.

    Args:
        reads: what reads which 16-bit copy; of none, where it could be all.
    """

    def __init__(self, what: str, reads: dict[Tensor, str]):
        super().__init__(what)
        self.reads = reads


class _OnlyKernels(TorchFunctionMode):
    """Notes what else than `_KERNELS` reads one of `weights`, which a forward pass without it will
    do again. What isn't for a gradient may be half of something that mustn't be done twice: raises
    ReadsWeight before.

    Attributes:
        reads: what has read which weight.
        written: tensors that aren't trained and were written to, with their values before.
    """

    def __init__(self, weights: list[Tensor]):
        super().__init__()
        self._weights = {id(w) for w in weights}
        self.reads: dict[Tensor, str] = {}
        self.written: dict[Tensor, Tensor] = {}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _may_write(_name(function)):
            for target in pytree.tree_leaves(args[:1]):
                if isinstance(target, Tensor) and not target.requires_grad:
                    self.written.setdefault(target, target.clone())
        if not _is_harmless(function):
            for value in pytree.tree_leaves((args, kwargs)):
                if id(value) in self._weights:
                    what = f"{_name(function)} reads its weight"
                    if not torch.is_grad_enabled() or _may_write(_name(function)):
                        raise ReadsWeight(what, {})
                    self.reads.setdefault(value, what)
        return function(*args, **kwargs)


def _may_write(name: str) -> bool:
    if name.startswith("__"):
        return name.startswith("__i") or name == "__setitem__"
    return name == ".data" or name.endswith("_")


def _name(function) -> str:
    name = getattr(function, "__name__", str(function))
    return f".{function.__self__.__name__}" if name == "__get__" else name


def _is_harmless(function) -> bool:
    name = _name(function)
    if name.startswith("."):
        return name not in _VALUES
    return name in _QUESTIONS or function in _KERNELS


class LowWeights:
    """For forward and backward, modules see the 16-bit copies in place of their parameters.

    Args:
        places: of `places_of_low`.
        copies: of those parameters.
        thorough: for a first step: also looks at what is done with the copies. Functions that
            were compiled run eagerly.

    Raises:
        ReadsWeight: within the block and by `forward_is_done`, if `thorough`.
        RuntimeError: at the end, where the block has written to a weight or to its copy.
    """

    def __init__(self, places: list[tuple], copies: dict[Tensor, Tensor], thorough: bool = False):
        self._places, self._copies, self._thorough = places, copies, thorough
        self._changed: list[tuple] = []
        self._dtypes: dict[Tensor, torch.dtype | None] = {}
        self._versions: dict[Tensor, tuple[int, int]] = {}
        self._stand_ins: dict[Tensor, Tensor] = {}
        self._looking, self._only_kernels = ExitStack(), _OnlyKernels([])

    def __enter__(self) -> None:
        for module, name, p in self._places:
            fits = p in self._copies and p.requires_grad and module._parameters.get(name) is p
            if not fits:
                continue
            if p not in self._stand_ins:
                # torch >= 2.10; before, autograd casts the gradient to the parameter's dtype
                if hasattr(p, "grad_dtype") and p.grad is None:
                    self._dtypes[p] = p.grad_dtype
                    p.grad_dtype = None
                self._stand_ins[p] = _C.low_weight(p, self._copies[p])
                self._versions[p] = self._versions_of(p)
            module._parameters[name] = self._stand_ins[p]
            self._changed.append((module, name, p))
        if self._thorough:  # into what is compiled as well, which therefore runs as it was written
            if "torch._dynamo" in sys.modules:  # else nothing is, and importing it takes seconds
                self._looking.enter_context(torch.compiler.set_stance("force_eager"))
            self._only_kernels = _OnlyKernels(list(self._stand_ins.values()))
            self._looking.enter_context(self._only_kernels)

    def __exit__(self, kind: type | None, *_) -> None:
        self._looking.close()
        for module, name, p in self._changed:
            module._parameters[name] = p
        if kind is not None and not issubclass(kind, RuntimeError):
            return
        for module, name, p in self._changed:
            if self._versions_of(p) != self._versions[p]:
                raise RuntimeError(
                    f"TrainStep: loss_fn writes to the {name} of a {type(module).__name__} of "
                    f"shape {list(p.shape)}, in whose place it finds a 16-bit copy; change weights "
                    "between steps, or leave precision out"
                )

    def put_back(self) -> None:
        """What `loss_fn` has written to, if this was thorough: a teacher's weights, say."""
        with torch.no_grad():
            for tensor, value in self._only_kernels.written.items():
                tensor.copy_(value)

    @property
    def reads(self) -> dict[Tensor, str]:
        """What has read which copy so far."""
        return self._only_kernels.reads

    def forward_is_done(self) -> None:
        if self.reads:
            raise ReadsWeight(next(iter(self.reads.values())), self.reads)

    def modules(self) -> list[nn.Module]:
        """Those that find copies in the place of parameters."""
        return list(dict.fromkeys(module for module, _, _ in self._changed))

    def stand_ins(self) -> list[Tensor]:
        """What these modules find, of parameters that take 16-bit gradients as they are."""
        return [t for p, t in self._stand_ins.items() if p in self._dtypes]

    def owners(self, weight: Tensor) -> list[nn.Module]:
        """The modules that find this copy in the place of a parameter."""
        return [m for m, _, p in self._changed if self._stand_ins[p] is weight]

    def _versions_of(self, p: Tensor) -> tuple[int, int]:
        return p._version, self._copies[p]._version

    def restore_grad_dtypes(self) -> None:
        """Once the gradients are used and gone; those that stay are cast, as autograd would have
        done it."""
        for p, dtype in self._dtypes.items():
            grad = p.grad
            p.grad = None
            p.grad_dtype = dtype
            if grad is not None:
                p.grad = grad if dtype is None else grad.to(dtype)
