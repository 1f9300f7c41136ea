# SPDX-License-Identifier: BSD-3-Clause
# What tr.regions gives: ranges of planes, the printed table, names, and what is refused.

import pytest
import torch
from testing import DEVICES, LM
from torch import nn

import torch_renaissance as tr
from torch_renaissance import Kind, Plane
from torch_renaissance.regions import ALIGNMENT

each_device = pytest.mark.parametrize("device", DEVICES)


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
