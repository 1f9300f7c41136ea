# SPDX-License-Identifier: BSD-3-Clause
# Where parameters and state lie: layout and blocks of random models, kinds, ranges of planes, the
# printed table, and parameters that join later.

from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import DEVICES, LM, parameters, train, values_of
from torch import nn

import torch_renaissance as tr
from torch_renaissance import Kind, Plane
from torch_renaissance._ops import _C
from torch_renaissance.regions import ALIGNMENT, classify, layout

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


# -- kinds -----------------------------------------------------------------------------------------


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(2, 3))
        self.stem, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.conv, self.up = nn.Conv1d(4, 4, 1, bias=False), nn.ConvTranspose2d(4, 4, 2)
        self.instance = nn.InstanceNorm2d(4, affine=True)
        self.layer, self.group = nn.LayerNorm([2, 4]), nn.GroupNorm(2, 4)
        self.rms = nn.RMSNorm(4)
        self.embedding, self.bag = nn.Embedding(5, 4), nn.EmbeddingBag(5, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.cross = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, bias=False)
        self.linear, self.bilinear = nn.Linear(4, 4), nn.Bilinear(2, 2, 4, bias=False)
        self.prelu, self.rnn = nn.PReLU(), nn.GRU(4, 4)
        self.head = nn.Linear(4, 5)
        self.head.weight = self.embedding.weight  # tied


KINDS = {
    "scale": Kind.BIAS,
    "table": Kind.OTHER_WEIGHT,
    "stem.weight": Kind.FIRST_CONV,
    "stem.bias": Kind.BIAS,
    "bn.weight": Kind.NORM_WEIGHT,
    "bn.bias": Kind.NORM_BIAS,
    "conv.weight": Kind.DEEP_CONV,
    "up.weight": Kind.DEEP_CONV,
    "up.bias": Kind.BIAS,
    "instance.weight": Kind.NORM_WEIGHT,
    "instance.bias": Kind.NORM_BIAS,
    "layer.weight": Kind.NORM_WEIGHT,
    "layer.bias": Kind.NORM_BIAS,
    "group.weight": Kind.NORM_WEIGHT,
    "group.bias": Kind.NORM_BIAS,
    "rms.weight": Kind.NORM_WEIGHT,
    "embedding.weight": Kind.EMBEDDING,
    "bag.weight": Kind.EMBEDDING,
    "attention.in_proj_weight": Kind.LINEAR_WEIGHT,
    "attention.in_proj_bias": Kind.BIAS,
    "attention.out_proj.weight": Kind.LINEAR_WEIGHT,
    "attention.out_proj.bias": Kind.BIAS,
    "cross.q_proj_weight": Kind.LINEAR_WEIGHT,
    "cross.k_proj_weight": Kind.LINEAR_WEIGHT,
    "cross.v_proj_weight": Kind.LINEAR_WEIGHT,
    "cross.out_proj.weight": Kind.LINEAR_WEIGHT,
    "linear.weight": Kind.LINEAR_WEIGHT,
    "linear.bias": Kind.BIAS,
    "bilinear.weight": Kind.LINEAR_WEIGHT,
    "prelu.weight": Kind.BIAS,
    "rnn.weight_ih_l0": Kind.OTHER_WEIGHT,
    "rnn.weight_hh_l0": Kind.OTHER_WEIGHT,
    "rnn.bias_ih_l0": Kind.BIAS,
    "rnn.bias_hh_l0": Kind.BIAS,
    "head.bias": Kind.BIAS,
}


def test_kind_of_every_parameter():
    model = Everything()
    found = classify(model)
    assert dict(found.values()) == KINDS
    assert {p: name for p, (name, _) in found.items()} == {
        p: n for n, p in model.named_parameters()
    }


def test_kinds_of_a_model_that_is_one_layer():
    convs = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)))
    assert list(classify(nn.Linear(2, 2)).values()) == [
        ("weight", Kind.LINEAR_WEIGHT),
        ("bias", Kind.BIAS),
    ]
    assert [kind for _, kind in classify(convs).values() if kind > Kind.BIAS] == [
        Kind.LINEAR_WEIGHT,
        Kind.FIRST_CONV,
        Kind.DEEP_CONV,
    ]


def test_which_kinds_are_bias_like():
    assert [kind for kind in Kind if kind.bias_like] == [
        Kind.NORM_BIAS,
        Kind.NORM_WEIGHT,
        Kind.BIAS,
    ]


@each_device
def test_kinds_sort_a_block(device):
    model = Everything().to(device)
    for p in model.rnn.parameters():
        p.requires_grad_(False)  # cuDNN keeps them where they are
    optimizer = torch.optim.AdamW(model.parameters())
    tr.accelerate(model, optimizer)
    (block,) = tr.regions(optimizer).blocks
    names = [s.name for s in block.slots]
    expected = {name: kind for name, kind in KINDS.items() if not name.startswith("rnn.")}
    assert names == sorted(expected, key=expected.get)  # a stable sort: by kind, then as listed
    assert [s.kind for s in block.slots] == [expected[name] for name in names]
    addresses = [s.param.data_ptr() for s in block.slots]
    assert addresses == sorted(addresses)


# -- ranges ----------------------------------------------------------------------------------------


def lm_in_groups(device):
    """Kinds by group. 0: NORM_BIAS, NORM_WEIGHT, BIAS, EMBEDDING; 1: LINEAR_WEIGHT."""
    torch.manual_seed(0)
    model = LM().to(device)
    weights = [model.mid.weight]
    others = [p for p in model.parameters() if p is not model.mid.weight]
    optimizer = torch.optim.AdamW([{"params": others}, {"params": weights}])
    tr.accelerate(model, optimizer)
    return model, optimizer


@each_device
def test_range_is_the_parameters_themselves(device):
    model, optimizer = lm_in_groups(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    part = tr.regions(optimizer)[Plane.W].range(Kind.NORM_BIAS, Kind.BIAS)
    assert part.dim() == 1 and part.is_contiguous() and part.numel() == 3 * ALIGNMENT // 4
    part.mul_(-3)
    for name, p in model.named_parameters():
        inside = name in ("norm.bias", "norm.weight", "mid.bias")
        assert torch.equal(p, before[name] * (-3 if inside else 1)), name
    model.norm.bias.data.fill_(5)
    assert (part[:4] == 5).all() and (part[4:64] == 0).all()


@each_device
def test_ranges_by_kind_and_group(device):
    model, optimizer = lm_in_groups(device)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    found = tr.regions(optimizer)
    for plane, key in ((Plane.W, None), (Plane.M, "exp_avg"), (Plane.V, "exp_avg_sq")):

        def held(p, key=key):
            return (p if key is None else optimizer.state[p][key]).detach().flatten()

        (whole,) = found[plane].tensors
        embedding = found[plane].range(Kind.EMBEDDING, Kind.OTHER_WEIGHT)
        linear = found[plane].range(Kind.NORM_BIAS, Kind.OTHER_WEIGHT, group=1)
        norm = found[plane].range(Kind.NORM_WEIGHT, Kind.NORM_WEIGHT)
        assert torch.equal(embedding[:28], held(model.emb.weight))
        assert torch.equal(linear[:16], held(model.mid.weight))
        assert torch.equal(norm[:4], held(model.norm.weight))
        first = found[plane].range(Kind.NORM_BIAS, Kind.OTHER_WEIGHT)
        assert torch.equal(torch.cat([first, linear]), whole)
        assert first.data_ptr() == whole.data_ptr()


def test_refusals_of_range():
    _, optimizer = lm_in_groups("cpu")
    found = tr.regions(optimizer)
    wrong = [
        (Plane.W, {"group": 1}, "block 0 has no NORM_BIAS to BIAS of param group 1"),
        (Plane.W, {"group": 2}, "block 0 has no NORM_BIAS to BIAS of param group 2"),
        (Plane.W, {"block": 1}, "block 1 has no plane W"),
        (Plane.W, {"block": -1}, "block -1 has no plane W"),
        (Plane.M, {}, "block 0 has no plane M"),
    ]
    for plane, where, message in wrong:
        with pytest.raises(ValueError, match=f"^{message}$"):
            found[plane].range(Kind.NORM_BIAS, Kind.BIAS, **where)
    with pytest.raises(ValueError, match="has no FIRST_CONV to DEEP_CONV of param group 0"):
        found[Plane.W].range(Kind.FIRST_CONV, Kind.DEEP_CONV)
    with pytest.raises(ValueError, match="has no BIAS to NORM_BIAS of param group 0"):
        found[Plane.W].range(Kind.BIAS, Kind.NORM_BIAS)


def test_range_refuses_what_no_longer_lies_together():
    a, b, c = (nn.Parameter(torch.ones(100)) for _ in range(3))
    optimizer = tr.optim.SGD([{"params": [a]}, {"params": [b, c]}], lr=0.1)
    assert tr.regions(optimizer)[Plane.W].range(Kind.BIAS, Kind.BIAS, group=1).numel() == 2 * 128
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())
    with pytest.raises(ValueError, match="don't lie together in block 0; moved away: none"):
        tr.regions(optimizer)[Plane.W].range(Kind.BIAS, Kind.BIAS, group=0)
    a.data = a.data.clone()
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match=r"moved away: param_groups\[0\]\['params'\]\[0\]"):
        tr.regions(optimizer)[Plane.W].range(Kind.BIAS, Kind.BIAS, group=0)


# -- what users see --------------------------------------------------------------------------------


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 200)
        self.buffer = torch.zeros(50)
        self.view = nn.Parameter(self.buffer[1:18])
        self.wave = nn.Parameter(torch.zeros(4, dtype=torch.complex64))
        self.sieve = nn.Parameter(torch.zeros(4, 4)[:, ::2])
        self.wide = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.zeros(1000), requires_grad=False)


def test_table():
    model = Odd()
    late = [model.linear.bias, model.wide]
    early = [p for p in model.parameters() if all(p is not q for q in late)]
    optimizer = torch.optim.Adam([{"params": early}, {"params": late}])
    tr.accelerate(model, optimizer)
    table = str(tr.regions(optimizer)).splitlines()
    head = "kind group tensors parameters bytes offset planes".split()
    assert [line.split() for line in table[:9]] == [
        "block 0: float32 on cpu, 7,936 bytes".split(),
        head,
        "NORM_BIAS 0 1 8 32 0 W".split(),
        "NORM_WEIGHT 0 1 8 32 256 W".split(),
        "LINEAR_WEIGHT 0 1 1,600 6,400 512 W".split(),
        "BIAS 1 1 200 800 6,912 W".split(),
        "block 1: float64 on cpu, 256 bytes".split(),
        head,
        "OTHER_WEIGHT 1 1 9 72 0 W".split(),
    ]
    assert table[9:] == [
        "loose: view (its storage is shared)",
        "left to torch: wave (torch.strided torch.complex64)",
        "left to torch: sieve (strides (4, 2) leave gaps)",
    ]
    for p in (*late, *model.norm.parameters(), model.linear.weight):
        p.grad = torch.ones_like(p)
    optimizer.step()
    model.view.grad = torch.ones_like(model.view)
    optimizer.step()
    before = [line for line in table[:9] if line.endswith(" W")]
    table = str(tr.regions(optimizer)).splitlines()
    assert [line for line in table if line.endswith(" W M V")] == [f"{line} M V" for line in before]
    (loose,) = (
        line for line in table if line.endswith("  M V")
    )  # its state, in a block of its own
    assert loose.split() == "BIAS 0 1 17 68 0 M V".split()


def test_the_program_moves_a_parameter():
    model, optimizer = lm_in_groups("cpu")
    model.mid.weight.data = model.mid.weight.data.clone()
    assert tr.regions(optimizer).loose == {"mid.weight": "moved by the program"}


def test_names_without_a_module():
    model = nn.Linear(3, 2)
    named = tr.optim.AdamW(model.named_parameters())
    bare = tr.optim.AdamW([{"params": [model.weight]}, {"params": [model.bias]}])
    given_module = tr.optim.AdamW(model)
    names = [[s.name for s in tr.regions(o).slots] for o in (named, bare, given_module)]
    assert names[0] == names[2] == ["weight", "bias"]
    assert names[1] == ["param_groups[0]['params'][0]", "param_groups[1]['params'][0]"]
    kinds = [[s.kind for s in tr.regions(o).slots] for o in (bare, given_module)]
    assert kinds == [[Kind.OTHER_WEIGHT, Kind.BIAS], [Kind.LINEAR_WEIGHT, Kind.BIAS]]


def test_nothing_to_train():
    optimizer = tr.optim.SGD(nn.Linear(3, 2).requires_grad_(False).parameters(), lr=0.1)
    found = tr.regions(optimizer)
    assert str(found) == "no parameter that requires grad"
    assert found.padding_fraction == 0.0 and not found.blocks


@pytest.mark.parametrize("native", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_another_optimizer_has_no_regions(native):
    optimizer = native(nn.Linear(3, 2).parameters(), lr=0.1)
    message = f"^regions: {native.__name__} has no regions; pass an optimizer that tr.accelerate"
    with pytest.raises(TypeError, match=message):
        tr.regions(optimizer)


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
