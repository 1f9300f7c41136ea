# SPDX-License-Identifier: BSD-3-Clause
"""Regions: contiguous, 256-byte aligned memory for parameters and state, sorted by kind."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import torch
from torch import Tensor, nn

from ._ops import _C

ALIGNMENT = 256  # bytes; what CUDA's allocator and vector loads like

_NORMS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
_CONVS = (nn.modules.conv._ConvNd,)
_LINEARS = (nn.Linear, nn.Bilinear, nn.MultiheadAttention)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


class Kind(IntEnum):
    """What a parameter is. Kinds lie in this order within their param group; up to `BIAS` they are
    bias-like, the rest are weights."""

    NORM_BIAS = 0
    NORM_WEIGHT = 1
    BIAS = 2
    LINEAR_WEIGHT = 3
    EMBEDDING = 4
    FIRST_CONV = 5
    DEEP_CONV = 6
    OTHER_WEIGHT = 7

    @property
    def bias_like(self) -> bool:
        return self <= Kind.BIAS


class Plane(Enum):
    """A region's copies, one purpose each; a tensor has the same offset in all of a block's."""

    W = "weights"
    G = "gradients"
    M = "first moment or momentum"
    V = "second moment"
    VMAX = "largest second moment (amsgrad)"
    E = "averaged weights"
    H = "16-bit weights"


def kind_by_shape(p: Tensor) -> Kind:
    """The kind of a parameter of which nothing else is known."""
    known = not isinstance(p, nn.parameter.UninitializedTensorMixin)
    return Kind.BIAS if known and p.ndim <= 1 else Kind.OTHER_WEIGHT


def classify(module: nn.Module) -> dict[Tensor, tuple[str, Kind]]:
    """Name and kind of each parameter of `module`, in its order; a tied one under its first name.

    Norm layers' parameters are NORM_*, every other parameter with `ndim <= 1` is a BIAS, and the
    first convolution that the module lists is FIRST_CONV.
    """
    found: dict[Tensor, tuple[str, Kind]] = {}
    first_conv = next((m for m in module.modules() if isinstance(m, _CONVS)), None)
    for prefix, owner in module.named_modules():
        for name, p in owner.named_parameters(recurse=False):
            if p in found:
                continue
            kind = kind_by_shape(p)
            if isinstance(owner, _NORMS):
                kind = Kind.NORM_BIAS if name == "bias" else Kind.NORM_WEIGHT
            elif kind is Kind.BIAS:
                pass
            elif isinstance(owner, _EMBEDDINGS):
                kind = Kind.EMBEDDING
            elif isinstance(owner, _CONVS):
                kind = Kind.FIRST_CONV if owner is first_conv else Kind.DEEP_CONV
            elif isinstance(owner, _LINEARS):
                kind = Kind.LINEAR_WEIGHT
            found[p] = (f"{prefix}.{name}" if prefix else name, kind)
    return found


def layout(numels: Sequence[int], element_size: int) -> tuple[list[int], int]:
    """Offsets in elements, each on `ALIGNMENT` bytes, for tensors of these sizes; and the total."""
    unit = ALIGNMENT // element_size
    offsets, total = [], 0
    for n in numels:
        offsets.append(total)
        total += -(-n // unit) * unit
    return offsets, total


@dataclass(eq=False)
class Slot:
    """One parameter of an optimizer: what it is, and where its weight and its state lie."""

    param: Tensor
    name: str
    kind: Kind
    group: int
    decays: bool
    made_for: tuple = ()  # dtype, device, shape and strides that the blocks were laid out for
    home: Block | None = None  # whose plane W has room for it
    home_index: int = 0
    why_loose: str = ""
    block: Block | None = None  # whose planes hold its state
    index: int = 0  # within that block
    state: dict[str, Tensor] = field(default_factory=dict)  # its slices there, by torch's names

    @property
    def loose(self) -> bool:
        """Whether the weight lies outside the regions; the update works on it all the same."""
        if self.home is None:
            return True
        return self.param.data_ptr() != self.home.address(Plane.W, self.home_index)


class Block:
    """Planes for the same tensors of one device and dtype. Immutable but for planes added later."""

    def __init__(self, slots: Sequence[Slot], planes: Iterable[Plane]):
        self.slots = list(slots)
        first = self.slots[0].param
        self.device, self.dtype = first.device, first.dtype
        self.numels = numels = [s.param.numel() for s in slots]
        self.offsets, self.size = layout(numels, first.element_size())
        self.planes: dict[Plane, Tensor] = {}
        for plane in planes:
            self.add(plane)
        self.steps = torch.zeros(len(slots), dtype=torch.float32, device=self.device)
        table = _C.chunk_table(numels, self.offsets, first.element_size())
        if self.device.type == "cuda":  # from pinned memory the copy waits for nothing
            table = table.pin_memory()
        self.chunks = table.to(self.device, non_blocking=True)
        self.like = torch.empty(0, dtype=self.dtype, device=self.device)
        self.norms: Tensor | None = None

    def add(self, plane: Plane, dtype: torch.dtype | None = None) -> None:
        dtype = dtype or self.dtype
        if plane not in self.planes or self.planes[plane].dtype != dtype:
            # The CPU's allocator aligns less than CUDA's.
            spare = ALIGNMENT // dtype.itemsize if self.device.type == "cpu" else 0
            memory = torch.zeros(self.size + spare, dtype=dtype, device=self.device)
            start = -memory.data_ptr() % ALIGNMENT // dtype.itemsize
            self.planes[plane] = memory[start : start + self.size]

    def add_norms(self) -> None:
        """Room for each slot's norms and ratio, and for the sums of squares of each chunk."""
        if self.norms is None:
            size = 3 * len(self.slots) + 2 * len(self.chunks)
            self.norms = torch.full((size,), math.nan, dtype=torch.float64, device=self.device)

    def ratios(self) -> Tensor:
        """A copy of the slots' trust ratios, float32 [n_slots]; NaN before the first update."""
        return self.norms[2 : 3 * len(self.slots) : 3].float()

    def has(self, slot: Slot) -> bool:
        return slot.home is self or slot.block is self

    def slice(self, plane: Plane, index: int) -> Tensor:
        """The part of `plane` that belongs to slot `index`, with a storage of its own."""
        return _C.slice_of(
            self.planes[plane], self.offsets[index], self.slots[index].param.detach()
        )

    def address(self, plane: Plane, index: int) -> int:
        """Where that part begins; 0 for an empty tensor, which has no address."""
        if self.slots[index].param.numel() == 0:
            return 0
        memory = self.planes[plane]
        return memory.data_ptr() + self.offsets[index] * memory.element_size()

    def step_of(self, index: int) -> Tensor:
        """The step counter of slot `index`, a 0-dim float32 tensor with a storage of its own."""
        return _C.slice_of(self.steps, index, self.steps[index])


class PlaneView:
    """One plane of a plan: `plan[Plane.W]`."""

    def __init__(self, plane: Plane, blocks: list[Block], slots: list[Slot]):
        self._plane, self._blocks, self._slots = plane, blocks, slots

    @property
    def tensors(self) -> list[Tensor]:
        """The whole plane: one flat tensor for each block that has it."""
        return [b.planes[self._plane] for b in self._blocks if self._plane in b.planes]

    def range(self, first: Kind, last: Kind, *, group: int = 0, block: int = 0) -> Tensor:
        """Kinds `first` to `last` of param group `group` as one flat, contiguous tensor that shares
        memory with the region (padding included, which is zero).

        Args:
            block: its number in `print(regions)`.

        Raises:
            ValueError: where the block has no such plane or parameters, or they don't lie together
                (any more), the group having changed or a parameter having moved away.
        """
        where = f"{first.name} to {last.name} of param group {group}"
        if not 0 <= block < len(self._blocks) or self._plane not in self._blocks[block].planes:
            raise ValueError(f"block {block} has no plane {self._plane.name}")
        b = self._blocks[block]
        chosen = [
            s for s in self._slots if s.group == group and first <= s.kind <= last and b.has(s)
        ]
        if not chosen:
            raise ValueError(f"block {block} has no {where}")
        away = [s.name for s in chosen if self._plane is Plane.W and s.loose]
        at = sorted(b.slots.index(s) for s in chosen)
        if away or at != list(range(at[0], at[-1] + 1)):
            raise ValueError(
                f"{where} don't lie together in block {block}; "
                f"moved away: {', '.join(away) or 'none'}"
            )
        stop = b.offsets[at[-1] + 1] if at[-1] + 1 < len(b.offsets) else b.size
        return b.planes[self._plane][b.offsets[at[0]] : stop]


class Regions:
    """What `tr.regions` returns: where everything lies. `print` it; index it by `Plane`."""

    def __init__(self, slots: Sequence[Slot], blocks: Sequence[Block], native: dict[str, str]):
        self.slots, self.blocks = list(slots), list(blocks)
        self.native = native  # name -> why it is left to torch's own form

    def __getitem__(self, plane: Plane) -> PlaneView:
        return PlaneView(plane, self.blocks, self.slots)

    @property
    def loose(self) -> dict[str, str]:
        """Parameters that stay where they are, by name, with the reason."""
        return {s.name: s.why_loose or "moved by the program" for s in self.slots if s.loose}

    @property
    def padding_fraction(self) -> float:
        """Share of the blocks' memory that is padding."""
        size = sum(b.size for b in self.blocks)
        used = sum(s.param.numel() for b in self.blocks for s in self.slots if b.has(s))
        return 1 - used / size if size else 0.0

    def __str__(self) -> str:
        row = "{:<14} {:>5} {:>8} {:>14} {:>15} {:>15}  {}".format
        lines = []
        for i, b in enumerate(self.blocks):
            dtype = str(b.dtype).removeprefix("torch.")
            lines.append(f"block {i}: {dtype} on {b.device}, {b.size * b.dtype.itemsize:,} bytes")
            lines.append(row("kind", "group", "tensors", "parameters", "bytes", "offset", "planes"))
            planes = " ".join(p.name for p in b.planes) or "-"
            present = [(j, s) for j, s in enumerate(b.slots) if s in self.slots and b.has(s)]
            for group, kind in sorted({(s.group, s.kind) for _, s in present}):
                at = [j for j, s in present if (s.group, s.kind) == (group, kind)]
                n = sum(b.slots[j].param.numel() for j in at)
                size = b.dtype.itemsize
                lines.append(
                    row(
                        kind.name,
                        group,
                        f"{len(at):,}",
                        f"{n:,}",
                        f"{n * size:,}",
                        f"{b.offsets[at[0]] * size:,}",
                        planes,
                    )
                )
        lines += [f"loose: {name} ({why})" for name, why in self.loose.items()]
        lines += [f"left to torch: {name} ({why})" for name, why in self.native.items()]
        return "\n".join(lines) or "no parameter that requires grad"


def regions(optimizer: torch.optim.Optimizer) -> Regions:
    """Where the parameters and the state of `optimizer` lie.

    Args:
        optimizer: one that `tr.accelerate` returned or one of `tr.optim`'s. Its regions are made
            now if they are not there yet; state planes appear with the first step.

    Raises:
        TypeError: for any other optimizer.
    """
    if not hasattr(optimizer, "_regions"):
        raise TypeError(
            f"regions: {type(optimizer).__name__} has no regions; pass an optimizer that "
            "tr.accelerate returned or one of tr.optim's"
        )
    return optimizer._regions()
