# SPDX-License-Identifier: BSD-3-Clause
# Where parameters and state lie: the layout, blocks of random models, and those of parameters that
# join later.

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import DEVICES, parameters, train, values_of
from torch import nn

import torch_renaissance as tr
from torch_renaissance import Kind, Plane
from torch_renaissance._ops import _C
from torch_renaissance.regions import ALIGNMENT, layout

few = settings(max_examples=25, deadline=None)
each_device = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
PLANE_OF = {"exp_avg": Plane.M, "exp_avg_sq": Plane.V, "max_exp_avg_sq": Plane.VMAX}


# -- layout ----------------------------------------------------------------------------------------

numels_of = st.lists(st.integers(0, 5000), max_size=20)
sizes_of = st.sampled_from([2, 4, 8])


@few
@given(numels=numels_of, size=sizes_of)
def test_layout(numels, size):
    offsets, total = layout(numels, size)
    for offset, n, following in zip(offsets, numels, [*offsets, total][1:], strict=True):
        assert 0 <= (following - offset - n) * size < ALIGNMENT  # in order, and close together
    assert all(offset * size % ALIGNMENT == 0 for offset in [*offsets, total])
    assert [*offsets, total][0] == 0


@few
@given(numels=numels_of, size=sizes_of)
def test_chunks_cover_each_element_once(numels, size):
    offsets, total = layout(numels, size)
    covered, expected, seen = torch.zeros(total), torch.zeros(total), []
    for offset, n in zip(offsets, numels, strict=True):
        expected[offset : offset + n] = 1
    for offset, start, packed in _C.chunk_table(numels, offsets, size).tolist():
        count, slot = packed & 0xFFFFFFFF, packed >> 32
        assert count * size <= 8192 and start + count <= numels[slot]
        assert offset == offsets[slot] + start and offset * size % 16 == 0
        covered[offset : offset + count] += 1
        seen.append(slot)
    assert torch.equal(covered, expected)
    assert seen == sorted(seen) and set(seen) == set(range(len(numels)))  # empty ones too


# -- blocks of random models -----------------------------------------------------------------------


class Raw(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)


def channels_last(module):
    return module.to(memory_format=torch.channels_last)


LAYERS = {
    "linear": lambda: nn.Linear(3, 5),
    "norm": lambda: nn.LayerNorm(7),
    "batch_norm": lambda: nn.BatchNorm2d(65),
    "embedding": lambda: nn.Embedding(11, 3),
    "conv": lambda: nn.Conv2d(4, 6, 3),
    "conv_channels_last": lambda: channels_last(nn.Conv2d(4, 6, 3)),
    "transposed": lambda: Raw(torch.randn(5, 3).t()),
    "empty": lambda: Raw(torch.randn(0, 3)),
    "0-dim": lambda: Raw(torch.randn(())),
    "of-exactly-256-bytes": lambda: Raw(torch.randn(64)),
    "large": lambda: Raw(torch.randn(33, 65)),
}


@dataclass(frozen=True)
class Layer:
    kind: str
    dtype: torch.dtype
    groups: tuple[int, int]  # of its weight, and of the rest
    frozen: bool
    tied: bool  # to the weight of the first layer like it


layers_of = st.lists(
    st.builds(
        Layer,
        st.sampled_from(sorted(LAYERS)),
        st.sampled_from(DTYPES),
        st.tuples(st.integers(0, 2), st.integers(0, 2)),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=8,
)


def build(layers, device):
    """A model of these layers, and its param groups."""
    model, first, groups = nn.ModuleList(), {}, {}
    for layer in layers:
        module = LAYERS[layer.kind]().to(device, layer.dtype)
        module.requires_grad_(not layer.frozen)
        like = first.setdefault((layer.kind, layer.dtype), module)
        if layer.tied:
            module.weight = like.weight
        model.append(module)
        for name, p in module.named_parameters():
            groups.setdefault(p, layer.groups[name != "weight"])
    chosen = [[p for p, group in groups.items() if group == g] for g in range(3)]
    return model, [{"params": params} for params in chosen if params]


def check_blocks(found, params):
    """Everything lies where design and alignment want it, and nothing lies over another."""
    assert {s.param for s in found.slots} == {p for p in params if p.requires_grad}
    spans = []
    for block in found.blocks:
        order = [(s.group, s.kind) for s in block.slots]
        assert order == sorted(order)
        for plane, memory in block.planes.items():
            assert (memory.dtype, memory.device) == (block.dtype, block.device)
            if memory.numel():
                spans.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
            if memory.is_cuda:  # a CPU's memory begins where torch's allocator has it begin
                assert memory.data_ptr() % ALIGNMENT == 0
            parts = [block.slice(plane, i) for i in range(len(block.slots))]
            inside = memory.data_ptr()
            for part in parts:
                if part.numel():
                    assert (part.data_ptr() - memory.data_ptr()) % ALIGNMENT == 0
                    assert inside <= part.data_ptr()
                    inside = part.data_ptr() + part.nbytes
            assert inside <= memory.data_ptr() + memory.nbytes
            assert memory.count_nonzero() == sum(p.count_nonzero() for p in parts)  # padding: zero
    spans.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def offset_in(tensor, memory):
    return (tensor.data_ptr() - memory.data_ptr()) // memory.element_size()


def check_slots(found, optimizer):
    assert not found.loose and not found.native
    for s in found.slots:
        if s.param.numel():
            weights = s.home.planes[Plane.W]
            assert offset_in(s.param, weights) == s.home.offsets[s.home_index]
        for key, value in optimizer.state.get(s.param, {}).items():
            if key != "step" and value.numel():
                assert value.stride() == s.param.stride()
                assert offset_in(value, s.block.planes[PLANE_OF[key]]) == s.block.offsets[s.index]


@each_device
@few
@given(layers=layers_of, amsgrad=st.booleans())
def test_blocks_of_random_models(device, layers, amsgrad):
    model, groups = build(layers, device)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(groups, lr=0.1, amsgrad=amsgrad)
    before, strides = values_of(params), [p.stride() for p in params]
    pointers = [p.data_ptr() for p in params]
    tr.accelerate(model, optimizer)

    found = tr.regions(optimizer)
    assert all(map(torch.equal, params, before))
    check_blocks(found, params)
    for step in range(3):
        for i, p in enumerate(params):
            p.grad = torch.randn_like(p) if p.requires_grad and (i + step) % 3 else None
        optimizer.step()
    check_blocks(tr.regions(optimizer), params)
    check_slots(tr.regions(optimizer), optimizer)

    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    assert [p.stride() for p in params] == strides and all(p.is_leaf for p in params)
    for p, pointer, value in zip(params, pointers, before, strict=True):
        if p.requires_grad:
            assert p.untyped_storage().nbytes() == p.nbytes and p.storage_offset() == 0
        else:
            assert p.data_ptr() == pointer and torch.equal(p, value)


def test_padding_of_resnet50():
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    model.to_empty(device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tr.accelerate(model, optimizer)
    found = tr.regions(optimizer)
    (block,) = found.blocks
    assert len(block.slots) == 161 and not found.loose
    used = sum(p.numel() for p in model.parameters())
    assert found.padding_fraction == pytest.approx(1 - used / block.planes[Plane.W].numel())
    assert 0 < found.padding_fraction < 0.01


# -- later -----------------------------------------------------------------------------------------


def addresses(optimizer):
    """Of all there is: planes, parameters, state."""
    found = tr.regions(optimizer)
    planes = [t.data_ptr() for b in found.blocks for t in (*b.planes.values(), b.steps, b.chunks)]
    held = {
        s.param: [s.param.data_ptr(), *(t.data_ptr() for t in optimizer.state[s.param].values())]
        for s in found.slots
    }
    return planes, held


def step_with_gradients(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p) if p.requires_grad else None
    optimizer.step()


@each_device
@pytest.mark.parametrize("how", ["unfrozen", "added"])
def test_later_parameters_get_blocks_of_their_own(how, device):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)).to(device)
    late = [model[1].weight, model[2].weight]
    early = [p for p in model.parameters() if all(p is not q for q in late)]
    if how == "unfrozen":
        for p in late:
            p.requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters())
    else:
        optimizer = torch.optim.AdamW(early)
    tr.accelerate(model, optimizer)
    step_with_gradients(optimizer)
    blocks, (planes, held) = tr.regions(optimizer).blocks[:], addresses(optimizer)
    assert held.keys() == set(early) and [len(b.slots) for b in blocks] == [4]

    if how == "unfrozen":
        for p in late:
            p.requires_grad_(True)
    else:
        optimizer.add_param_group({"params": late})
    step_with_gradients(optimizer)
    found, (planes_after, held_after) = tr.regions(optimizer), addresses(optimizer)
    assert found.blocks[0] is blocks[0] and len(found.blocks) == 2
    assert planes_after[: len(planes)] == planes
    assert {p: held_after[p] for p in early} == held and held_after.keys() == {*early, *late}
    group = 0 if how == "unfrozen" else 1
    assert [(s.param, s.kind, s.group) for s in found.blocks[1].slots] == [
        (late[0], Kind.NORM_WEIGHT, group),
        (late[1], Kind.DEEP_CONV, group),
    ]
    part = found[Plane.W].range(Kind.DEEP_CONV, Kind.DEEP_CONV, group=group, block=1)
    assert part.data_ptr() == late[1].data_ptr() and part.numel() == 64
    check_blocks(found, [*early, *late])
    check_slots(found, optimizer)


@each_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_padding_stays_zero_with_loose_and_native_parameters(dtype, device):
    params = parameters(device, dtype)
    optimizer = tr.optim.AdamW(params, amsgrad=True)
    train(optimizer, params, range(6))
    found = tr.regions(optimizer)
    assert len(found.loose) == 2 and len(found.native) == 1
    check_blocks(found, params[:-1])  # the last one has gaps
