# SPDX-License-Identifier: BSD-3-Clause
"""The state of parameters in blocks: made when torch makes it, adopted where it is the user's, and
given back where a parameter becomes torch's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._ops import _C
from ..regions import Block, Plane, Slot
from ._judge import is_fresh, kind_of, step_is_hosted
from ._rule import Options, Rule


class PlanState:
    """What a Plan knows of `optimizer.state`. Until the plan's end of a `sync` only our own memory
    is written; entries to rebind wait in `_pending`."""

    rule: Rule
    options: Options
    slots: dict[Tensor, Slot]
    native: dict[Tensor, tuple[str, str]]
    blocks: list[Block]
    low: dict[Tensor, torch.dtype]
    sums: bool
    _dropped: list[Slot]
    _pending: list[tuple[dict, str, Tensor]]
    _averages_before: dict[Tensor, Tensor]

    def _drop(self, slot: Slot, why: str) -> None:
        """Leaves a parameter to torch."""
        self.slots.pop(slot.param, None)
        self.native[slot.param] = slot.name, why
        self._dropped.append(slot)

    def _keep_state(self, optimizer) -> None:
        """Copies state that is not ours into our slices; forgets what the user deleted."""
        wanting = [
            s
            for s in self.slots.values()
            if s.block is None and optimizer.state.get(s.param) and self._needs(optimizer, s)
        ]
        self._give_blocks(optimizer, wanting)
        for slot in list(self.slots.values()):
            if slot.block is None:
                continue
            entry = optimizer.state.get(slot.param)
            if not entry:
                self._forget(slot)
                continue
            for key in self.rule.planes:
                self._adopt(slot, entry, key)
            if self.rule.shows_step and slot.state:
                self._adopt(slot, entry, "step")

    def _adopt(self, slot: Slot, entry: dict, key: str) -> None:
        mine, value = slot.state.get(key), entry.get(key)
        if value is None:
            if mine is not None:
                self._reset(slot, key)
            return
        if mine is None:
            self._add_plane(slot.block, key)
            mine = slot.state[key]
        if value is mine and mine.data_ptr() == self._address(slot, key):
            return
        if isinstance(value, Tensor) and value.device.type == "cpu" and value.is_shared():
            self._drop(slot, f"its {key} lies in shared memory")
            return
        if value is mine:  # moved away under our hands, by `.data =` say: its values count
            value, mine = mine.clone(), self._slice(slot, key)
            slot.state[key] = mine
        value = torch.as_tensor(value)
        if value.numel() != mine.numel() or (key != "step" and value.shape != mine.shape):
            raise RuntimeError(
                f"optimizer.state[{slot.name!r}][{key!r}] has shape {list(value.shape)}, its "
                f"parameter {list(mine.shape)}; load a state_dict of the same model"
            )
        mine.copy_(value.reshape(mine.shape) if key == "step" else value)
        self._pending.append((entry, key, mine))
        if not self.rule.shows_step:  # a momentum buffer that exists has begun
            slot.block.steps[slot.index].clamp_(min=1)

    def _reset(self, slot: Slot, key: str) -> None:
        slot.state[key].zero_()
        if not self.rule.shows_step:
            slot.block.steps[slot.index].zero_()

    def _forget(self, slot: Slot) -> None:
        for key in slot.state:
            self._reset(slot, key)

    def _make_state(self, optimizer) -> None:
        """State as torch makes it: for a parameter that has a gradient, when it first has one."""
        active = [s for s in self.slots.values() if s.param.grad is not None]
        wanting = self.slots.values() if self.low else active  # 16-bit copies are read beforehand
        self._give_blocks(optimizer, [s for s in wanting if s.block is None])
        for slot in active:
            for key in self._needs(optimizer, slot):
                self._add_plane(slot.block, key)
        for slot in active:
            keys = self._needs(optimizer, slot)
            if not keys:
                continue
            entry = optimizer.state[slot.param]
            for key in ("step", *keys) if self.rule.shows_step else keys:
                if entry.get(key) is None:
                    entry[key] = slot.state[key]

    def _return_state(self, optimizer) -> None:
        """State of a parameter that is torch's from now on, as torch would have made it."""
        for slot in self._dropped:
            entry = optimizer.state.get(slot.param)
            if not entry or not slot.state:
                continue
            if is_fresh(entry, self.rule.planes, slot.block.steps[slot.index]):
                del optimizer.state[slot.param]
                continue
            group = optimizer.param_groups[slot.group]
            for key, mine in slot.state.items():
                if entry.get(key) is not mine or mine.data_ptr() != self._address(slot, key):
                    continue
                hosted = key == "step" and step_is_hosted(group)
                entry[key] = entry[key].cpu() if hosted else entry[key].clone()
        self._dropped.clear()

    def _needs(self, optimizer, slot: Slot) -> tuple[str, ...]:
        return self.rule.needed(optimizer.param_groups[slot.group])

    def _give_blocks(self, optimizer, slots: list[Slot]) -> None:
        for batch in batches(slots, lambda s: (self._needs(optimizer, s), id(s.home))):
            home = batch[0].home
            # Where all tensors of a block of weights begin together, state joins them there.
            block = home if home and home.slots == batch and not _has_state(home) else None
            keys = self._needs(optimizer, batch[0])
            planes = [self.rule.planes[k] for k in keys]
            if block is None:
                block = Block(batch, planes)
                self.blocks.append(block)
            for plane in planes:
                block.add(plane)
            for i, s in enumerate(batch):
                s.block, s.index = block, i
                s.state = {"step": block.step_of(i)} if self.rule.shows_step else {}
                s.state |= {k: block.slice(self.rule.planes[k], i) for k in keys}

    def _add_extra_planes(self) -> None:
        for block in self._stateful():
            if self.rule.adapts:
                block.add_norms()
            if self.options.gradients == "flat" or self.sums:
                block.add(Plane.G)
            dtypes = {self.low[s.param] for s in block.slots if s.param in self.low}
            for dtype in dtypes:
                block.add(Plane.H, dtype)
            if self.options.averages and Plane.E not in block.planes:
                block.add(Plane.E)
                for i, s in enumerate(block.slots):
                    before = self._averages_before.get(s.param, s.param)
                    block.slice(Plane.E, i).copy_(before)

    def _add_plane(self, block: Block, key: str) -> None:
        block.add(self.rule.planes[key])
        for s in block.slots:
            if s.block is block and key not in s.state:
                s.state[key] = block.slice(self.rule.planes[key], s.index)

    def _slice(self, slot: Slot, key: str) -> Tensor:
        if key == "step":
            return slot.block.step_of(slot.index)
        return slot.block.slice(self.rule.planes[key], slot.index)

    def _address(self, slot: Slot, key: str) -> int:
        if key == "step":
            return slot.block.steps.data_ptr() + slot.block.steps.element_size() * slot.index
        return slot.block.address(self.rule.planes[key], slot.index)

    def _stateful(self) -> list[Block]:
        used = {id(s.block) for s in self.slots.values() if s.block is not None}
        return [b for b in self.blocks if id(b) in used]


def _has_state(block: Block) -> bool:
    return any(s.block is block for s in block.slots)


def batches(slots: list[Slot], apart: Callable[[Slot], object]) -> list[list[Slot]]:
    """Slots that can share a block: same device, dtype and `apart`; sorted by group and kind."""
    batches: dict[tuple, list[Slot]] = {}
    for s in slots:
        batches.setdefault((*kind_of(s.param), apart(s)), []).append(s)
    result = []
    for batch in batches.values():
        batch.sort(key=lambda s: (s.group, s.kind))
        result += [batch[i : i + _C.MAX_SLOTS] for i in range(0, len(batch), _C.MAX_SLOTS)]
    return result
