# SPDX-License-Identifier: BSD-3-Clause
"""Keeps an optimizer's regions in step with what its user does to parameters, groups and state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._ops import _C
from ..regions import Block, Kind, Plane, Regions, Slot
from ._judge import (
    kind_of,
    made_for,
    overlapping,
    why_loose,
    why_native,
    why_unsupported,
)
from ._plan_state import PlanState, batches
from ._rule import Options, Rule


class Plan(PlanState):
    """Slots, blocks and launches of one optimizer.

    `sync` makes them fit the optimizer as it is now; `host` then runs steps until it finds that
    something has changed.
    """

    def __init__(self, rule: Rule, options: Options):
        self.rule, self.options = rule, options
        self.slots: dict[Tensor, Slot] = {}
        self.native: dict[Tensor, tuple[str, str]] = {}  # name, and why
        self.blocks: list[Block] = []
        self.host = _C.HostStep(rule.name)
        self._dropped: list[Slot] = []  # whose state goes back to ordinary tensors
        self._pending: list[tuple[dict, str, Tensor]] = []  # state entries to rebind at the end
        self._tables: dict[torch.device, dict[str, Tensor]] = {}
        self._entries: list[Slot] = []
        self.swapped = False  # while `Ema.swapped` has the averages in the parameters
        self.low: dict[Tensor, torch.dtype] = {}  # parameters that have a copy in plane H
        self.sums = False  # whether plane G is there for sums over micro-batches
        self._averages_before: dict[Tensor, Tensor] = {}  # of an earlier plan or a pickle
        self._averaged_before = 0

    @property
    def simple(self) -> bool:
        """Whether `host` alone makes a step, unless something has changed."""
        return not (self.native or self.swapped) and self.options.gradients == "gather"

    # -- what the outside asks for ---------------------------------------------------------------

    def sync(self, optimizer: torch.optim.Optimizer, making: bool = True) -> None:
        """Adopts new parameters, moved ones and foreign state; `making`: and makes state for
        parameters that have got a gradient."""
        _check_groups(optimizer)
        self._pending.clear()
        # Memory made in inference mode couldn't be trained afterwards.
        with torch.inference_mode(False), torch.no_grad():
            moves = self._place(optimizer)
            self._keep_state(optimizer)
            if making:
                self._make_state(optimizer)
            self._add_extra_planes()
            # Until here only our own memory was written, so a failure has changed nothing.
            for p, weight in moves:
                p.data = weight
            for entry, key, value in self._pending:
                entry[key] = value
            self._return_state(optimizer)
            self._prune()
            self._hand_over(optimizer)

    def leave_to_torch(self, entries: Sequence[int]) -> None:
        """Parameters whose gradient the kernels don't take are torch's from now on."""
        for slot in [self._entries[i] for i in entries]:
            self._drop(slot, why_unsupported(slot.param, slot.param in self.low))

    def regions(self) -> Regions:
        return Regions(list(self.slots.values()), self.blocks, dict(self.native.values()))

    def skipped_steps(self) -> int:
        return sum(int(table["counters"][_C.SKIPPED]) for table in self._tables.values())

    def grad_norm(self) -> Tensor | None:
        """The last norm that a step found, as a tensor of its own; None before the first one."""
        chain = self.host.chain()
        wide = any(b.dtype == torch.float64 for b in self.blocks)
        dtype = torch.float64 if wide else torch.float32
        return None if chain is None else chain[_C.GRAD_NORM].to(dtype, copy=True)

    def decays(self, kind: Kind) -> bool:
        """Whether weight decay applies to a parameter, and a trust ratio where the rule has one."""
        return not kind.bias_like or (self.options.decay_bias_like and not self.rule.adapts)

    def trust_ratios(self) -> dict[str, Tensor]:
        ratios = {id(b): b.ratios() for b in self._stateful() if b.norms is not None}
        found = [s for s in self.slots.values() if id(s.block) in ratios and s.decays]
        return {s.name: ratios[id(s.block)][s.index] for s in found}

    # -- planes that only some steps need --------------------------------------------------------

    def averages(self) -> dict[Tensor, Tensor]:
        """The averaged weights by parameter, in plane E; of a parameter that hasn't been stepped
        since they were loaded, as they were loaded."""
        return self._averages_before | {
            s.param: s.block.slice(Plane.E, s.index)
            for s in self.slots.values()
            if s.block is not None and Plane.E in s.block.planes
        }

    def averaged(self) -> int:
        """How many updates the averages have seen. Waits for the device."""
        counts = [int(table["counters"][_C.AVERAGED]) for table in self._tables.values()]
        return max(counts, default=self._averaged_before)

    def start_averages(self, averages: dict[Tensor, Tensor], averaged: int) -> None:
        """Goes on from averages kept elsewhere: they count for blocks made from now on, and for
        those that exist."""
        self._averages_before, self._averaged_before = {}, averaged
        with torch.no_grad():
            for p, mine in self.averages().items():
                if p in averages:
                    mine.copy_(averages[p])
        self._averages_before = dict(averages)
        for table in self._tables.values():
            table["counters"][_C.AVERAGED] = averaged

    def low_copies(self) -> dict[Tensor, Tensor]:
        """Slices of plane H, by parameter."""
        return {
            s.param: s.block.slice(Plane.H, s.index)
            for s in self.slots.values()
            if s.block is not None and s.param in self.low and Plane.H in s.block.planes
        }

    def packed(self) -> list[Tensor]:
        return [b.planes[Plane.G] for b in self._stateful()]

    def summed(self) -> dict[Tensor, Tensor]:
        """Sums of gradients over micro-batches, slices of plane G, by parameter."""
        found = zip(self._entries, self.host.accumulated(), strict=True)
        return {s.param: s.block.slice(Plane.G, s.index) for s, has in found if has}

    # -- parameters ------------------------------------------------------------------------------

    def _place(self, optimizer) -> list[tuple[Tensor, Tensor]]:
        """Gives every parameter a slot or leaves it to torch; returns (parameter, new memory)."""
        self.options.learn({p for group in optimizer.param_groups for p in group["params"]})
        present: set[Tensor] = set()
        twice: set[Tensor] = set()
        fresh: list[Slot] = []
        for g, group in enumerate(optimizer.param_groups):
            for i, p in enumerate(group["params"]):
                (twice if p in present else present).add(p)
                slot = self.slots.get(p)
                if slot is not None and slot.made_for != made_for(p):
                    slot = self._convert(slot, optimizer.state.get(p))
                if slot is not None:
                    slot.group = g
                elif p not in self.native and (p.requires_grad or p.grad is not None):
                    names = group.get("param_names")
                    name = names[i] if names else f"param_groups[{g}]['params'][{i}]"
                    name, kind = self.options.describe(p, name)
                    why = why_native(p, group)
                    if why:
                        self.native[p] = name, why
                    elif p not in twice:
                        fresh.append(Slot(p, name, kind, g, True, made_for(p)))
        for gone in [p for p in self.slots if p not in present]:
            del self.slots[gone]
        for gone in [p for p in self.native if p not in present]:
            del self.native[gone]
        self.slots.update({s.param: s for s in fresh})
        for slot in list(self.slots.values()):
            slot.decays = self.decays(slot.kind)
            why = (
                "is listed twice"
                if slot.param in twice
                else why_unsupported(slot.param, slot.param in self.low)
            )
            if why:
                self._drop(slot, why)
        for p in overlapping(list(self.slots)):
            self._drop(self.slots[p], "shares memory with another parameter")
        fresh = [s for s in fresh if s.param in self.slots]
        return self._give_homes(fresh)

    def _give_homes(self, fresh: list[Slot]) -> list[tuple[Tensor, Tensor]]:
        for s in fresh:
            s.why_loose = why_loose(s.param)
        moves = []
        for slots in batches([s for s in fresh if not s.why_loose], lambda s: None):
            block = Block(slots, [Plane.W])
            for i, s in enumerate(slots):
                s.home, s.home_index = block, i
                moves.append((s.param, block.slice(Plane.W, i).copy_(s.param)))
            self.blocks.append(block)
        return moves

    def _convert(self, slot: Slot, state: dict | None) -> None:
        """After `model.to(...)` or `p.data = ...` of another dtype, device or layout: the parameter
        starts anew, unless state of the old kind is left, which torch will judge."""
        del self.slots[slot.param]
        if slot.block is not None and Plane.E in slot.block.planes:
            average = slot.block.slice(Plane.E, slot.index)
            self._averages_before[slot.param] = average.to(slot.param.device, slot.param.dtype)
        kept = [v for k, v in (state or {}).items() if k in self.rule.planes]
        if any(kind_of(t) != kind_of(slot.param) for t in kept if isinstance(t, Tensor)):
            self._drop(slot, "its state has another dtype or device")

    def _prune(self) -> None:
        """Lets go of memory that nothing lies in any more."""
        slots = list(self.slots.values())
        for block in self.blocks:
            if Plane.W in block.planes and all(s.loose for s in slots if s.home is block):
                del block.planes[Plane.W]
                for s in slots:
                    s.home = None if s.home is block else s.home
        used = {id(b) for s in slots for b in (s.home, s.block)}
        self.blocks = [b for b in self.blocks if id(b) in used]

    # -- launches --------------------------------------------------------------------------------

    def _table(self, device: torch.device, n_groups: int) -> dict[str, Tensor]:
        """What all launches of a device share: counters, the table of hyper-parameters with the
        row that controls the step, and what the norm pass finds."""
        if device not in self._tables:
            averaged = self.averaged()  # a device that comes later goes on with the others
            table = self._tables[device] = {}
            table["counters"] = torch.zeros(_C.COUNTERS, dtype=torch.int32, device=device)
            table["counters"][_C.AVERAGED] = averaged
            for name, size in (("chain", _C.CONTROL_RESULTS), ("partials", _C.NORM_PARTIALS)):
                table[name] = torch.zeros(size, dtype=torch.float64, device=device)
        table = self._tables[device]
        if "hyper" not in table or table["hyper"].shape[0] != 2 * n_groups + 1:
            shape = 2 * n_groups + 1, _C.HYPER_COLUMNS
            table["hyper"] = torch.zeros(shape, dtype=torch.float64, device=device)
        return table

    def _hand_over(self, optimizer) -> None:
        launches: list[dict] = []
        place: dict[int, tuple[int, int, int]] = {}  # block -> launch, first slot, segment
        open_launch: dict[tuple, int] = {}
        for block in self._stateful():
            kind = (block.device, block.dtype)
            at = open_launch.get(kind)
            if at is None or not _fits(launches[at]["segments"], block):
                at = open_launch[kind] = len(launches)
                table = self._table(block.device, len(optimizer.param_groups))
                launches.append({**table, "segments": []})
            segments = launches[at]["segments"]
            first = sum(len(s["steps"]) for s in segments)
            place[id(block)] = (at, first, len(segments))
            planes = [block.planes.get(plane) for plane in self.rule.planes.values()]
            segments.append(
                {"planes": planes, "steps": block.steps, "chunks": block.chunks}
                | {"numels": block.numels, "norms": block.norms}
                | {"packed": block.planes.get(Plane.G), "like": block.like}
                | {"ema": block.planes.get(Plane.E), "low": block.planes.get(Plane.H)}
            )
        self._entries = list(self.slots.values())
        low = self.low_copies()
        entries = []
        for s in self._entries:
            at, first, segment = place.get(id(s.block), (-1, 0, 0))
            entries.append(
                {
                    "param": s.param,
                    "group": s.group,
                    "decays": s.decays,
                    "launch": at,
                    "slot": first + s.index,
                    "planes": sum(p in s.block.planes for p in self.rule.planes.values())
                    if s.block
                    else 0,
                    "has_state": bool(optimizer.state.get(s.param)),
                    "segment": segment,
                    "offset": s.block.offsets[s.index] if s.block else 0,
                    "low": low.get(s.param),
                }
            )
        groups = [list(g["params"]) for g in optimizer.param_groups]
        known = self.slots.keys() | self.native.keys()
        frozen = [p for group in groups for p in group if p not in known]
        self.host.set_plan(groups, optimizer.state, entries, frozen, launches)


def _check_groups(optimizer) -> None:
    """What the host can compare with a plan: torch itself makes nothing else."""
    if not isinstance(optimizer.param_groups, list):
        raise TypeError(
            "optimizer.param_groups must be a list, as torch.optim makes it, got a "
            f"{type(optimizer.param_groups).__name__}"
        )
    for g, group in enumerate(optimizer.param_groups):
        if not isinstance(group["params"], list | tuple):
            raise TypeError(
                f"param_groups[{g}]['params'] must be a list or a tuple of parameters, got a "
                f"{type(group['params']).__name__}; use list(...) of it"
            )


def _fits(segments: list[dict], block: Block) -> bool:
    slots = sum(len(s["steps"]) for s in segments) + len(block.slots)
    return slots <= _C.MAX_SLOTS and len(segments) < _C.MAX_SEGMENTS
