# SPDX-License-Identifier: BSD-3-Clause
# Captured, the counters of all BatchNorms of a model move on by one kernel; whenever the program
# could look, they are as natively.

import copy

import pytest
import torch
from testing import DEVICES
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import torch_renaissance as tr
from torch_renaissance import _eager
from torch_renaissance._batch_counts import BatchCounts

on_devices = pytest.mark.parametrize("device", DEVICES)


class Additions(TorchDispatchMode):
    """Counts what adds to integers."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        first = args[0] if isinstance(args[0], list | tuple) else args[:1]
        whole = any(isinstance(t, torch.Tensor) and t.dtype == torch.int64 for t in first)
        self.found += whole and name in ("aten::add_", "aten::_foreach_add_")
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """One norm is called twice, one not at all, and of three none counts."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.twice, self.never = (nn.BatchNorm1d(6) for _ in range(4))
        self.still = nn.BatchNorm1d(6)
        self.without = nn.BatchNorm1d(6, track_running_stats=False)
        self.instance = nn.InstanceNorm1d(6, track_running_stats=True)
        self.inner = nn.Sequential(nn.BatchNorm1d(6), nn.ReLU(), nn.BatchNorm1d(6))

    def forward(self, x):
        x = self.twice(self.b(self.twice(self.a(input=x))))
        x = self.instance(x[..., None].expand(-1, -1, 3)).mean(2) + x
        return self.inner(self.without(self.still(x)))


def net(device):
    torch.manual_seed(0)
    model = Net().to(device)
    model.still.eval()
    return model


def counting(model, *more):
    return BatchCounts([model, *more], list(model.modules()))


def counts(model):
    return {k: int(v) for k, v in model.state_dict().items() if k.endswith("tracked")}


@on_devices
def test_as_natively_with_fewer_kernels(device):
    model, x = net(device), torch.randn(5, 6, device=device)
    native = copy.deepcopy(model)
    outputs = []
    for each, together in ((native, False), (model, True)):
        with counting(each) if together else Additions() as _, Additions() as additions:
            for _ in range(3):
                outputs.append(each(x))
        # Those that are called once together, and the one that is called twice.
        assert additions.found == 3 * (2 if together else 6)
    assert all(map(torch.equal, outputs[:3], outputs[3:]))
    assert counts(model) == counts(native)
    assert counts(model)["twice.num_batches_tracked"] == 6
    buffers = zip(model.buffers(), native.buffers(), strict=True)
    assert all(torch.equal(b, c) for b, c in buffers)
    assert not any("forward" in vars(m) for m in model.modules())


@on_devices
def test_a_module_that_is_called_without_its_root_counts_at_once(device):
    model, x = net(device), torch.randn(5, 6, device=device)
    with counting(model):
        model.a(x)
        assert model.a.num_batches_tracked == 1
        model.inner(x)
        assert [int(m.num_batches_tracked) for m in (model.inner[0], model.inner[2])] == [1, 1]
        model(x)
        assert model.a.num_batches_tracked == 2


@on_devices
def test_cumulative_averages_are_left_to_torch(device):
    model = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.BatchNorm1d(6)).to(device)
    native = copy.deepcopy(model)
    with counting(model):
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(5, 6, device=device)
            assert torch.equal(model(x), native(x))
    assert counts(model) == counts(native)


def test_an_exception_leaves_modules_as_they_were():
    class Fails(Net):
        def forward(self, x):
            self.a(x)
            raise KeyError("on purpose")

    model = Fails()
    tracked = model.a.num_batches_tracked
    with counting(model):
        with pytest.raises(KeyError, match="on purpose"):
            model(torch.randn(5, 6))
        assert model.a.num_batches_tracked == 1  # as natively: it has seen the batch
    assert not any("forward" in vars(m) for m in model.modules())
    assert model.a.num_batches_tracked is tracked


@pytest.mark.parametrize("with_norm", [False, True])
def test_what_was_put_there_meanwhile_stays(with_norm):
    layer = nn.Linear(6, 6)
    roots = [layer, nn.BatchNorm1d(6)] if with_norm else [layer]
    counts = BatchCounts(roots, roots)
    vars(layer)["forward"] = stand_in = lambda x: 2 * x
    x = torch.ones(2, 6)
    with counts:
        assert torch.equal(layer(x), 2 * x)
    assert vars(layer)["forward"] is stand_in
    assert not any("forward" in vars(m) for m in roots[1:])


def test_forwards_of_the_programs_own_stay():
    model = net("cpu")
    model.a.forward = own = lambda input: input
    model.forward = whole = lambda x: model.b(model.a(x))
    with counting(model):
        model(torch.randn(5, 6))
        assert model.b.num_batches_tracked == 1
    assert model.a.forward is own and model.forward is whole
    assert model.a.num_batches_tracked == 0


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(x) * self.norm.num_batches_tracked


@pytest.mark.parametrize("make, together", [(Net, True), (Reads, False)])
def test_models_that_read_their_counters(make, together):
    model = make()
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = tr.TrainStep(lambda x: model(x).square().mean(), optimizer)

    class Pool:
        def branch(self, number):
            return None

    aids = step._eager._aids(Pool())
    assert isinstance(aids.counts, BatchCounts) == together
    compiled = tr.TrainStep(lambda x: model(x).square().mean(), optimizer, compile=True)
    assert compiled._eager._aids(Pool()) is _eager._NO_AIDS


class Recomputed(nn.Module):
    """Checkpointed norms see each batch twice, natively too."""

    def __init__(self):
        super().__init__()
        self.outer, self.inner = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.linear = nn.Linear(6, 6)

    def forward(self, x):
        x = self.outer(self.linear(x))
        return checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)


@pytest.mark.cuda
@pytest.mark.parametrize("precision", [None, "bf16"])
@pytest.mark.parametrize("make", [Net, Recomputed, Reads])
def test_captured(make, precision):
    torch.manual_seed(0)
    model = make().cuda()
    model.train()
    native = copy.deepcopy(model)
    _, ours = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.01))
    step = tr.TrainStep(lambda x: model(x).square().mean(), ours, precision=precision, strict=True)
    optimizer = torch.optim.SGD(native.parameters(), lr=0.01)
    for seed in range(8):
        torch.manual_seed(seed)
        x = torch.randn(5, 6, device="cuda")
        with torch.autocast("cuda", torch.bfloat16, enabled=precision is not None):
            loss = native(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(x), loss.detach(), rtol=0.02, atol=0.0)
    assert step.captured and counts(model) == counts(native)


@pytest.mark.cuda
def test_captured_it_is_one_kernel():
    torch.manual_seed(0)
    layers = [m for _ in range(5) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6))]
    model = nn.Sequential(*layers).cuda()
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    step = tr.TrainStep(lambda x: model(x).square().mean(), optimizer, strict=True, warmup=2)
    for _ in range(4):
        step(torch.randn(5, 6, device="cuda"))
    kernels = step.explain().kernels
    assert sum(n for name, n in kernels.items() if "<long>" in name and "add" in name.lower()) <= 1
    assert set(counts(model).values()) == {4}
