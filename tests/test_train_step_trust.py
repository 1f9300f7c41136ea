# SPDX-License-Identifier: BSD-3-Clause
# What TrainStep does where a step can't be captured, or must not be: training goes on as in the
# native loop, one warning says why, strict raises, and nothing of the attempt is left. Then verify,
# exceptions, explain, reset, and what the constructor refuses.

import copy
import gc
import itertools
import random
import re
import types
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from stepping import ADAMW, BOTH, NESTEROV, WARMUP, Twins, by_hand, mean_square, noise, noises
from testing import DEVICES, close, equal, mlp, pair, same, same_state
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)
each_row = pytest.mark.parametrize("row", BOTH, ids=lambda row: row.native.__name__)
only_cuda = pytest.mark.cuda
FILE = Path(__file__).name
ON_THE_CPU = "TrainStep runs eagerly: the parameters are on the CPU, which has no graphs"


class Net(nn.Module):
    """Draws random numbers, keeps statistics, and counts its calls if it is to."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.drop, self.last = nn.Dropout(0.3), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.drop(torch.tanh(self.norm(self.first(x)))))


def net_pair(device, row=ADAMW, make=Net):
    return pair(make, lambda m: row.native(m.parameters(), **row.options), device)


def seed(number=3):
    torch.manual_seed(number)
    random.seed(number)
    numpy = pytest.importorskip("numpy")
    numpy.random.seed(number)


def random_states(device):
    numpy = pytest.importorskip("numpy")
    keys, position = numpy.random.get_state()[1:3]
    states = [torch.get_rng_state(), torch.tensor(random.getstate()[1])]
    states += [torch.from_numpy(keys.astype("int64")), torch.tensor(position)]
    return states + ([torch.cuda.get_rng_state()] if device == "cuda" else [])


def bits(model, optimizer, device):
    """Everything that a step changes."""
    state = optimizer.state_dict()["state"]
    found = [*model.parameters(), *model.buffers()]
    found += [v for entries in state.values() for v in entries.values() if v is not None]
    return [t.detach().clone() for t in found] + random_states(device)


class Warned(list):
    """The warnings of TrainStep inside of a with block."""

    def __enter__(self):
        self._catch = warnings.catch_warnings(record=True)
        self._all = self._catch.__enter__()
        warnings.simplefilter("always")
        return self

    def __exit__(self, *error):
        self._catch.__exit__(*error)
        self += [w for w in self._all if "TrainStep" in str(w.message)]

    @property
    def texts(self):
        return [str(w.message) for w in self]


def capturing(x):
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


# -- failures --------------------------------------------------------------------------------------


def asks_for_the_value(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        loss.item()
        return loss

    return loss_fn


def copies_to_the_cpu(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        loss.detach().cpu().numpy()
        return loss

    return loss_fn


def masks(model):
    def loss_fn(x):
        out = model(x)
        return out[out > -1e9].pow(2).mean()

    return loss_fn


def prints(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        print(f"{loss.detach():.12f}")
        return loss

    return loss_fn


def prints_the_tensor(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        print(loss.detach())
        return loss

    return loss_fn


def synchronizes(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if x.is_cuda:
            torch.cuda.synchronize()
        return loss

    return loss_fn


def synchronizes_the_stream(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if x.is_cuda:
            torch.cuda.current_stream().synchronize()
        return loss

    return loss_fn


def branches(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if loss > 0.01:
            return loss * 0.5
        return loss

    return loss_fn


def copies_from_the_cpu(model):
    def loss_fn(x):
        weight = torch.tensor([0.5, 1.0, 2.0, 1.0], dtype=x.dtype, device=x.device)
        return model(x * weight).pow(2).mean()

    return loss_fn


class AsksInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        grad.sum().item()
        return grad


def asks_in_backward(model):
    return lambda x: AsksInBackward.apply(model(x)).pow(2).mean()


def raises_in_the_capture(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if capturing(x):
            raise ZeroDivisionError("only now")
        return loss

    return loss_fn


def raises_at_the_call_of_the_capture(model):
    counter = itertools.count()

    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if next(counter) == WARMUP and x.is_cuda:
            raise ZeroDivisionError("only now")
        return loss

    return loss_fn


def runs_out_of_memory(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        if capturing(x):
            torch.empty(1 << 50, dtype=torch.uint8, device=x.device)
        return loss

    return loss_fn


def draws_from_torch(model):
    return lambda x: model(x).pow(2).mean() * torch.rand((), dtype=torch.float64)


def draws_from_python(model):
    return lambda x: model(x).pow(2).mean() * random.random()


def draws_from_numpy(model):
    numpy = pytest.importorskip("numpy")
    return lambda x: model(x).pow(2).mean() * float(numpy.random.rand())


def counts(model):
    model.calls = 0

    def loss_fn(x):
        model.calls += 1
        return model(x).pow(2).mean() * (1 + model.calls % 3)

    return loss_fn


def stores_an_activation(model):
    """As models do whose attention maps a program looks at now and then."""
    model.out = None

    def loss_fn(x):
        model.out = model(x)
        return model.out.pow(2).mean()

    return loss_fn


def counts_in_the_capture(model):
    model.captures = 0

    def loss_fn(x):
        model.captures += capturing(x)
        return model(x).pow(2).mean()

    return loss_fn


def hooks_an_activation(model):
    def loss_fn(x):
        out = model(x)
        out.register_hook(lambda grad: grad * 2)
        return out.pow(2).mean()

    return loss_fn


@dataclass(frozen=True)
class Failure:
    loss_of: object
    reason: str  # on a GPU, a pattern
    line: str = ""  # of this file, that the warning names

    def __str__(self):
        return self.loss_of.__name__


SYNC = "synchronizing CUDA operation|Cannot copy between CPU and CUDA tensors"
FAILURES = [
    Failure(asks_for_the_value, SYNC, "loss.item()"),
    Failure(copies_to_the_cpu, SYNC, "loss.detach().cpu().numpy()"),
    Failure(masks, SYNC, "return out[out > -1e9].pow(2).mean()"),
    Failure(prints, SYNC, 'print(f"{loss.detach():.12f}")'),
    Failure(prints_the_tensor, SYNC, "print(loss.detach())"),
    Failure(synchronizes, "captur|synchroniz", "torch.cuda.synchronize()"),
    Failure(
        synchronizes_the_stream, "captur|synchroniz", "torch.cuda.current_stream().synchronize()"
    ),
    Failure(branches, SYNC, "if loss > 0.01:"),
    Failure(copies_from_the_cpu, SYNC, "weight = torch.tensor("),
    Failure(asks_in_backward, SYNC),
    Failure(raises_in_the_capture, "only now", 'raise ZeroDivisionError("only now")'),
    Failure(raises_at_the_call_of_the_capture, "only now", 'raise ZeroDivisionError("only now")'),
    Failure(runs_out_of_memory, "out of memory", "torch.empty(1 << 50"),
    Failure(draws_from_torch, "draws from torch's CPU generator on the host"),
    Failure(draws_from_python, "draws from Python's random on the host"),
    Failure(draws_from_numpy, r"draws from numpy\.random on the host"),
    Failure(counts, "it changes at every step: .*'calls'"),
    Failure(stores_an_activation, "it changes at every step: .*'out'"),
    Failure(counts_in_the_capture, "changes Python's state: .*'captures'"),
    Failure(hooks_an_activation, "a tensor gets a hook at ", "out.register_hook("),
]
each_failure = pytest.mark.parametrize("failure", FAILURES, ids=str)
# Those that a capture finds out, at the first call after the warm-up.
CAPTURED = [f for f in FAILURES if f.loss_of not in (counts, stores_an_activation)]
each_captured_failure = pytest.mark.parametrize("failure", CAPTURED, ids=str)


def trained(step, device, batches):
    """Losses, from a fixed seed, and the random states afterwards."""
    seed()
    losses = torch.stack([step(*batch) for batch in batches])
    return losses, random_states(device)


class Bystander:
    """Another model's captured step, which must live through whatever happens."""

    def __init__(self, device):
        self.device = device
        self.twins = Twins(Net, NESTEROV, mean_square, device)
        with Warned():
            self.twins.run(noises(WARMUP + 2, 6, 4, device=device))
        self.twins.check_replays(True, True)

    def check(self):
        """Its graph replays, random numbers are fresh, and new captures work."""
        self.twins.run(noises(3, 6, 4, device=self.device))
        self.twins.check_replays(True, True, True)
        self.twins.check()
        draws = [torch.rand(4, device=self.device) for _ in range(2)]
        assert not torch.equal(*draws)
        torch.manual_seed(0)
        first = torch.rand(4, device=self.device)
        torch.manual_seed(0)
        assert torch.equal(torch.rand(4, device=self.device), first)
        later = Twins(Net, ADAMW, mean_square, self.device)
        with Warned() as found:
            later.run(noises(WARMUP + 3, 6, 4, device=self.device))
        assert len(found) == (self.device != "cuda")
        later.check_replays(True, True, True)
        later.check()


@each_failure
def test_training_goes_on_as_native_and_one_warning_says_why(failure, device, capsys):
    bystander = Bystander(device)
    a, oa, b, ob = net_pair(device)
    batches = noises(14, 6, 4, device=device)
    loss_fns = [failure.loss_of(model) for model in (a, b)]
    if failure.loss_of is raises_at_the_call_of_the_capture:
        loss_fns[0] = mean_square(a)  # the native loop meets no capture
    expected, states = trained(by_hand(loss_fns[0], oa), device, batches)
    printed = capsys.readouterr().out
    step = tr.TrainStep(loss_fns[1], ob)
    with Warned() as found:
        losses, our_states = trained(step, device, batches)
    assert capsys.readouterr().out == printed
    close(losses, expected)
    same(a, b)
    same_state(oa, ob)
    assert equal(our_states, states)
    assert all(p.grad is None for p in b.parameters())
    if failure.loss_of in (counts, counts_in_the_capture):
        assert {k: v for k, v in vars(a).items() if isinstance(v, int)} == {
            k: v for k, v in vars(b).items() if isinstance(v, int)
        }
    assert not step.captured
    assert len(found) == 1, found.texts
    if device == "cuda":
        assert re.search(failure.reason, found.texts[0]), found.texts
        if failure.line:
            assert FILE in found.texts[0] and failure.line in found.texts[0]
        assert step.explain().graphs == []
    else:
        assert found.texts == [ON_THE_CPU]
    assert found[0].filename == __file__  # where the step was called
    assert len(step.explain().fallbacks) == 1
    bystander.check()


@only_cuda
@each_captured_failure
def test_strict_raises_and_nothing_has_changed(failure, device):
    if device != "cuda":
        pytest.skip("a CPU has no captures")
    bystander = Bystander(device)
    _, _, model, optimizer = net_pair(device)
    loss_fn = failure.loss_of(model)
    step = tr.TrainStep(loss_fn, optimizer, strict=True)
    seed()
    for batch in noises(WARMUP, 6, 4, device=device):
        step(*batch)
    before = bits(model, optimizer, device)
    attributes = {k: v for k, v in vars(model).items() if isinstance(v, int)}
    x = noise(50, 6, 4, device=device)
    for _ in range(2):
        with pytest.raises(tr.CaptureError, match=failure.reason):
            step(x)
        assert equal(bits(model, optimizer, device), before)
        assert {k: v for k, v in vars(model).items() if isinstance(v, int)} == attributes
        assert all(p.grad is None for p in model.parameters())
    bystander.check()


def memory():
    """What is allocated and reserved, without what torch keeps for later."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


# torch keeps two numbers for a generator that has been captured; and small blocks live in segments
# of 2 MiB, of which a new one may be begun.
CRUMBS, SEGMENT = 4096, 2 << 20


@only_cuda
@each_captured_failure
def test_a_failed_capture_leaves_no_memory_behind(failure, device):
    if device != "cuda":
        pytest.skip("a CPU has no captures")
    bystander = Bystander(device)
    _, _, model, optimizer = net_pair(device)

    def with_large_activations(loss_fn):
        def both(x):
            x.repeat(1 << 20, 2).mul(2).sum()  # 400 MB for the time of a step
            return loss_fn(x)

        return both

    step = tr.TrainStep(with_large_activations(failure.loss_of(model)), optimizer)
    x = noise(0, 6, 4, device=device)
    with Warned() as found:
        for _ in range(WARMUP):
            step(x)
        before = memory()
        assert not found
        step(x)
        after = memory()
    assert len(found) == 1
    assert after[0] <= before[0] + CRUMBS
    assert after[1] <= before[1] + SEGMENT
    bystander.check()


def test_what_changes_at_every_step_is_not_kept_alive(device):
    """Else the graphs of autograd behind stored activations would fill the memory."""
    alive = []

    def loss_of(model):
        loss_fn = stores_an_activation(model)

        def with_record(x):
            loss = loss_fn(x)
            alive.append(weakref.ref(model.out))
            return loss

        return with_record

    _, _, model, optimizer = net_pair(device)
    step = tr.TrainStep(loss_of(model), optimizer)
    with Warned() as found:
        for batch in noises(40, 6, 4, device=device):
            step(*batch)
    assert len(found) == 1
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= 2


# -- failures of other kinds -----------------------------------------------------------------------


class WithExtra(Net):
    """Two parameters more, which no optimizer has."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(())), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return super().forward(x) * self.scale + self.shift


def without_extra(model):
    return [p for name, p in model.named_parameters() if name not in ("scale", "shift")]


@pytest.mark.parametrize("zeroed", [False, True], ids=["sums", "zeroed by the program"])
def test_gradients_of_parameters_outside_of_the_optimizer(zeroed, device):
    """They add up in `.grad` as in the native loop, which replays would overwrite."""
    bystander = Bystander(device)
    a, oa, b, ob = pair(WithExtra, lambda m: torch.optim.AdamW(without_extra(m), lr=0.01), device)
    runs = []
    with Warned() as found:
        for model, step in (
            (a, by_hand(mean_square(a), oa)),
            (b, tr.TrainStep(mean_square(b), ob)),
        ):
            seed()
            gradients = []
            for batch in noises(8, 6, 4, device=device):
                if zeroed:
                    model.zero_grad()
                step(*batch)
                gradients += [model.scale.grad.clone(), model.shift.grad.clone()]
            runs.append(torch.stack([g.flatten()[0] for g in gradients]))
    close(runs[1], runs[0])
    same(a, b)
    same_state(oa, ob)
    assert not step.captured
    assert len(found) == 1
    if device == "cuda":
        assert re.search(r"scale gets a gradient but isn't in the optimizer", found.texts[0])
    bystander.check()


def test_a_gradient_of_a_tensor_of_the_closure(device):
    """A leaf that belongs to no module."""
    leaves = []

    def loss_of(model):
        leaf = torch.ones(4, dtype=torch.float64, device=device, requires_grad=True)
        leaves.append(leaf)
        return lambda x: model(x * leaf).pow(2).mean()

    twins = Twins(mlp, NESTEROV, loss_of, device)
    with Warned() as found:
        twins.run(noises(8, 6, 4, device=device))
    assert len(found) == 1
    close(leaves[1].grad, leaves[0].grad)
    twins.check()


def test_a_new_module_whose_parameters_no_optimizer_has(device):
    twins = Twins(mlp, NESTEROV, mean_square, device)
    with Warned() as found:
        twins.run(noises(6, 6, 4, device=device))
        twins.check_replays(True, True, True)
        torch.manual_seed(1)
        new = nn.Linear(8, 1).to(device, torch.float64)
        for model, _ in twins:
            model[2] = copy.deepcopy(new)
        for batch in noises(6, 6, 4, device=device, first=6):
            close(twins.step(*batch), twins.native(*batch))
            assert not twins.step.captured
    assert len(found) == 1
    twins.check()
    close(twins.models[1][2].weight.grad, twins.models[0][2].weight.grad)


def test_a_batch_that_requires_a_gradient(device):
    """As for adversarial inputs."""
    twins = Twins(Net, ADAMW, mean_square, device)
    with Warned() as found:
        for i in range(8):
            xs = [noise(i, 6, 4, device=device).requires_grad_() for _ in "ab"]
            torch.manual_seed(i)
            expected = twins.native(xs[0])
            torch.manual_seed(i)
            close(twins.step(xs[1]), expected)
            assert xs[1].grad is not None
            close(xs[1].grad, xs[0].grad)
            assert not twins.step.captured
    assert len(found) == 1
    if device == "cuda":
        assert "isn't plain data" in found.texts[0]
    twins.check()


class Labelled(torch.Tensor):
    pass


def test_a_batch_of_a_subclass_of_tensor(device):
    twins = Twins(
        mlp, ADAMW, lambda m: lambda x: m(x.as_subclass(torch.Tensor)).pow(2).mean(), device
    )
    with Warned() as found:
        twins.run([(x.as_subclass(Labelled),) for (x,) in noises(8, 6, 4, device=device)])
    assert len(found) == 1
    if device == "cuda":
        assert "Labelled" in found.texts[0]
    twins.check()


def test_a_batch_in_an_object_that_the_program_refills(device):
    """What it holds is not among the arguments, so a replay would read its first tensors."""

    def loss_of(model):
        return lambda batch: model(batch.x).pow(2).mean()

    twins = Twins(mlp, ADAMW, loss_of, device)
    batch = types.SimpleNamespace()
    with Warned() as found:
        for i in range(10):
            batch.x = noise(i, 6, 4, device=device)
            twins.run([(batch,)])
    assert len(found) == 1
    twins.check()


def test_a_number_of_the_batch_that_changes_at_every_step(device):
    twins = Twins(mlp, ADAMW, lambda m: lambda x, factor: m(x).pow(2).mean() * factor, device)
    with Warned() as found:
        twins.run([(x, 1.0 + i / 7) for i, (x,) in enumerate(noises(40, 6, 4, device=device))])
    assert len(found) == 1, found.texts  # or nobody would learn why nothing is captured
    assert len(twins.step.explain().fallbacks) == 1
    twins.check()


def test_a_second_kind_of_failure_is_told_too(device):
    def loss_of(model):
        def loss_fn(x, kind):
            loss = model(x).pow(2).mean()
            if kind == "item":
                loss.item()
            return loss * random.random() if kind == "random" else loss

        return loss_fn

    twins = Twins(mlp, ADAMW, loss_of, device)
    xs = noises(24, 6, 4, device=device)
    with Warned() as found:
        for i, (x,) in enumerate(xs):
            random.seed(i)
            expected = twins.native(x, ("item", "random", "none")[i % 3])
            random.seed(i)
            close(twins.step(x, ("item", "random", "none")[i % 3]), expected)
            if i > 12:
                assert twins.step.captured == (i % 3 == 2 and device == "cuda")
    if device == "cuda":
        assert len(found) == 2
        assert re.search(SYNC, found.texts[0]) and "Python's random" in found.texts[1]
    else:
        assert found.texts == [ON_THE_CPU]
    twins.check()


# -- on a CPU --------------------------------------------------------------------------------------


def test_on_a_cpu_one_warning_and_no_more(device):
    _, _, model, optimizer = net_pair("cpu")
    step = tr.TrainStep(mean_square(model), optimizer)
    x = noise(0, 6, 4)
    with Warned() as found:
        step(x)
    assert found.texts == [ON_THE_CPU] and found[0].filename == __file__
    with Warned() as found:
        for i in range(5):
            step(noise(i, 3 + i, 4))
        model.eval()
        step(x)
    assert not found and not step.captured and step.inputs == ()


def test_on_a_cpu_strict_raises_and_nothing_has_changed(device):
    _, _, model, optimizer = net_pair("cpu")
    step = tr.TrainStep(mean_square(model), optimizer, strict=True)
    before = bits(model, optimizer, "cpu")
    for _ in range(2):
        with Warned() as found, pytest.raises(tr.CaptureError, match="are on the CPU"):
            step(noise(0, 6, 4))
    assert not found
    assert equal(bits(model, optimizer, "cpu"), before)
    assert issubclass(tr.CaptureError, RuntimeError)


# -- verify ----------------------------------------------------------------------------------------


def expect_captures(found, device):
    assert found.texts == ([] if device == "cuda" else [ON_THE_CPU])


@each_row
@pytest.mark.parametrize("accumulate", [1, 2])
def test_verify_passes_a_good_model(accumulate, row, device):
    """With dropout and batch norm, and for a second shape as well."""
    a, oa, b, ob = net_pair(device, row)
    _, _, c, oc = net_pair(device, row)
    steps = [
        tr.TrainStep(mean_square(b), ob, verify=True, accumulate=accumulate),
        tr.TrainStep(mean_square(c), oc, warmup=10**9, accumulate=accumulate),
    ]
    if accumulate == 1:
        steps.append(by_hand(mean_square(a), oa))
    batches = noises(10, 6, 4, device=device) + noises(6, 3, 4, device=device)
    with Warned() as found:
        runs = [trained(step, device, batches) for step in steps]
    assert len(found) == 2 * (device != "cuda")
    assert steps[0].captured == (device == "cuda")
    assert len(steps[0].explain().graphs) == 2 * (device == "cuda")
    for losses, states in runs[1:]:
        close(runs[0][0], losses)
        assert equal(runs[0][1], states)
    same(c, b)
    same_state(oc, ob)
    assert b.norm.num_batches_tracked == 16


def other_loss(model):
    return lambda x: model(x).pow(2).mean() * (2 if capturing(x) else 1)


def other_gradient(model):
    def loss_fn(x):
        loss = model(x).pow(2).mean()
        return loss + (loss - loss.detach()) if capturing(x) else loss

    return loss_fn


def other_buffer(model):
    def loss_fn(x):
        if capturing(x):
            model.norm.running_mean.add_(1)
        return model(x).pow(2).mean()

    return loss_fn


def other_extra(model):
    return lambda x: (model(x).pow(2).mean(), x.sum() + (1 if capturing(x) else 0))


def not_finite(model):
    return lambda x: model(x).pow(2).mean() * (float("nan") if capturing(x) else 1)


DIFFERENT = {
    other_loss: "a replay differs from an eager step: the loss: apart by",
    other_gradient: "a replay differs from an eager step: (model|plane)",
    other_buffer: r"a replay differs from an eager step: model\.norm\.running_mean",
    other_extra: "a replay differs from an eager step: extra 0",
    not_finite: "a replay differs from an eager step: the loss: finite in one and not in the other",
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("loss_of", DIFFERENT, ids=lambda f: f.__name__)
def test_verify_finds_a_model_that_is_another_in_a_capture(loss_of, strict, device):
    if strict and device != "cuda":
        pytest.skip("a CPU has no captures")
    bystander = Bystander(device)
    twins = Twins(Net, NESTEROV, loss_of, device, verify=True, strict=strict)
    batches = noises(10, 6, 4, device=device)
    if strict:
        twins.run(batches[:WARMUP])
        for _ in range(2):
            before = bits(twins.models[1], twins.optimizers[1], device)
            with pytest.raises(tr.CaptureError, match=DIFFERENT[loss_of]):
                twins.step(*batches[WARMUP])
            assert equal(bits(twins.models[1], twins.optimizers[1], device), before)
    else:
        with Warned() as found:
            twins.run(batches)
        assert not any(twins.replayed)
        assert len(found) == 1
        if device == "cuda":
            assert re.search(DIFFERENT[loss_of], found.texts[0]), found.texts
            assert twins.step.explain().graphs == []
    twins.check()
    bystander.check()


def test_without_verify_the_same_model_trains_otherwise(device):
    """Else the test above might pass for the wrong reason."""
    twins = Twins(Net, NESTEROV, other_loss, device)
    batches = noises(WARMUP + 1, 6, 4, device=device)
    with Warned():
        twins.run(batches[:WARMUP])
        losses = []
        for step in (twins.native, twins.step):
            torch.manual_seed(0)
            losses.append(step(*batches[WARMUP]))
    assert twins.step.captured == (device == "cuda")
    close(losses[1], losses[0] * (2 if device == "cuda" else 1))


@each_captured_failure
def test_verify_and_a_step_that_cannot_be_captured(failure, device):
    """The eager step that was to be compared counts, once."""
    if failure.loss_of is raises_at_the_call_of_the_capture:
        pytest.skip("that call is the eager one here")
    a, oa, b, ob = net_pair(device)
    batches = noises(8, 6, 4, device=device)
    expected, states = trained(by_hand(failure.loss_of(a), oa), device, batches)
    step = tr.TrainStep(failure.loss_of(b), ob, verify=True)
    with Warned() as found:
        losses, our_states = trained(step, device, batches)
    assert len(found) == 1 and not step.captured
    close(losses, expected)
    assert equal(our_states, states)
    same(a, b)
    same_state(oa, ob)


# -- exceptions of the program ---------------------------------------------------------------------


class BadBatchError(Exception):
    pass


def raises_for_bad_batches(model):
    def loss_fn(x, bad):
        loss = model(x).pow(2).mean()
        if bad:
            raise BadBatchError("a bad batch")
        return loss

    return loss_fn


@pytest.mark.parametrize("at", [0, 1, WARMUP, WARMUP + 1, WARMUP + 3])
@pytest.mark.parametrize("new_shape", [False, True])
def test_exceptions_of_loss_fn_reach_the_program(new_shape, at, device):
    """At the first call, in the warm-up, where a capture is tried, and afterwards. The other
    argument makes it a step of its own, with or without another shape."""
    twins = Twins(mlp, ADAMW, raises_for_bad_batches, device)
    bad = noise(99, 3 if new_shape else 6, 4, device=device)
    with Warned() as found:
        for i in range(at + 8):
            if i >= at and i < at + 4:
                for step in (twins.native, twins.step):
                    with pytest.raises(BadBatchError, match="a bad batch"):
                        step(bad, True)
                assert all(p.grad is None for p in twins.models[1].parameters())
            twins.run([(noise(i, 6, 4, device=device), False)])
    twins.check_replays(True, True)
    twins.check()
    assert len(found) <= 1 if device == "cuda" else found.texts == [ON_THE_CPU]


@pytest.mark.parametrize("at", [1, WARMUP])
def test_an_exception_that_passes(at, device):
    """The same arguments raise once and never again. What batch norm did before the error counts
    in both loops: a capture that raises does nothing, and the eager step after it raises anew."""
    tries = 2 if at == WARMUP and device == "cuda" else 1
    calls = [range(at, at + 1), range(at, at + tries)]  # that raise: of the native loop, and ours

    def loss_of(model):
        counter, bad = itertools.count(), calls.pop(0)

        def loss_fn(x):
            loss = model(x).pow(2).mean()
            if next(counter) in bad:
                raise BadBatchError("a bad batch")
            return loss

        return loss_fn

    twins = Twins(Net, NESTEROV, loss_of, device)
    batches = noises(14, 6, 4, device=device)
    with Warned() as found:
        twins.run(batches[:at])
        for step in (twins.native, twins.step):
            torch.manual_seed(at)
            with pytest.raises(BadBatchError):
                step(*batches[at])
        assert all(p.grad is None for p in twins.models[1].parameters())
        twins.run(batches[at:])
    twins.check()
    assert len(found) <= 1
    if at == 1:
        twins.check_replays(True)


def test_an_interrupt_in_a_capture(device):
    """KeyboardInterrupt is no Exception; the program goes on where it catches it."""
    bystander = Bystander(device)
    interrupts = ["now"]

    def loss_of(model):
        def loss_fn(x):
            loss = model(x).pow(2).mean()
            if capturing(x) and interrupts:
                interrupts.clear()
                raise KeyboardInterrupt
            return loss

        return loss_fn

    twins = Twins(Net, NESTEROV, loss_of, device)
    batches = noises(12, 6, 4, device=device)
    with Warned():
        twins.run(batches[:WARMUP])
        if device == "cuda":
            before = bits(twins.models[1], twins.optimizers[1], device)
            with pytest.raises(KeyboardInterrupt):
                twins.step(*batches[WARMUP])
            assert equal(bits(twins.models[1], twins.optimizers[1], device), before)
        twins.run(batches[WARMUP:])
    twins.check_replays(True)
    twins.check()
    bystander.check()


NO_LOSSES = {
    "a number": (lambda out: 1.0, TypeError, "got float"),
    "None": (lambda out: None, TypeError, "got NoneType"),
    "two elements": (lambda out: out[:2].flatten(), TypeError, r"got shape \[2\]"),
    "no elements": (lambda out: out[:0].flatten(), TypeError, r"got shape \[0\]"),
    "three values": (lambda out: (out.mean(), 1, 2), TypeError, "got tuple"),
    "a list": (lambda out: [out.mean(), 1], TypeError, "got list"),
    "no gradient": (lambda out: out.detach().mean(), RuntimeError, "doesn't require a gradient"),
}


@pytest.mark.parametrize(("make", "error", "text"), NO_LOSSES.values(), ids=NO_LOSSES)
def test_what_is_no_loss(make, error, text, device):
    def loss_of(model):
        def loss_fn(x, good):
            out = model(x)
            return out.pow(2).mean() if good else make(out)

        return loss_fn

    twins = Twins(mlp, ADAMW, loss_of, device)
    with Warned():
        for i in range(8):
            x = noise(i, 6, 4, device=device)
            if i in (0, 2, 5):
                with pytest.raises(error, match=f"TrainStep: .*{text}"):
                    twins.step(x, False)
            twins.run([(x, True)])
    twins.check_replays(True, True)
    twins.check()


def test_the_programs_autocast_and_precision_exclude_each_other(device):
    _, _, model, optimizer = net_pair(device)
    model.float()
    step = tr.TrainStep(mean_square(model), optimizer, precision="bf16")
    x = noise(0, 6, 4, device=device)
    with Warned(), torch.autocast(device, torch.bfloat16):
        with pytest.raises(RuntimeError, match="does its own autocast; call the step outside"):
            step(x)
    with Warned():
        for _ in range(WARMUP + 4):
            assert step(x).isfinite()
    assert step.captured == (device == "cuda")


# -- explain and reset -----------------------------------------------------------------------------


def test_explain_before_anything_has_run(device, capsys):
    _, _, model, optimizer = net_pair(device)
    found = tr.TrainStep(mean_square(model), optimizer).explain()
    assert capsys.readouterr().out == f"{found}\n" == "state: eager; 0 graphs in 0 bytes\n"
    assert (found.state, found.graphs, found.pool_bytes) == ("eager", [], 0)
    assert (found.fallbacks, found.autocast) == ({}, {})
    assert (found.nodes, found.kernels, found.key, found.replays) == (0, {}, "", 0)


def test_explain(device, capsys):
    _, _, model, optimizer = net_pair(device)

    def loss_fn(x, factor):
        if factor == 3.0:
            random.random()
        return model(x).pow(2).mean() * factor

    step = tr.TrainStep(loss_fn, optimizer)
    with Warned():
        for factor, rows in [(0.5, 6)] * 7 + [(0.5, 2)] * 4 + [(3.0, 6)] * 4:
            step(noise(rows, rows, 4, device=device), factor)
    capsys.readouterr()
    found = step.explain()
    text = capsys.readouterr().out
    assert text == f"{found}\n"
    assert found.state == "eager"  # the last call was
    assert found.autocast == {}
    if device != "cuda":
        assert found.graphs == [] and found.pool_bytes == 0
        assert found.fallbacks == {ON_THE_CPU.split(": ")[1]: 15}
        assert "eager 15 times: the parameters are on the CPU" in text
        return
    assert [g["key"] for g in found.graphs] == [
        "(float64[2, 4] on cuda:0, 0.5)",
        "(float64[6, 4] on cuda:0, 0.5)",
    ]
    assert [g["replays"] for g in found.graphs] == [3, 4] and found.replays == 7
    for g in found.graphs:
        assert g["nodes"] >= sum(g["kernels"].values()) > 10
        assert sum(n for name, n in g["kernels"].items() if "update_kernel" in name) == 1
    assert (found.nodes, found.kernels) == (found.graphs[0]["nodes"], found.graphs[0]["kernels"])
    assert found.key == found.graphs[0]["key"]
    assert found.pool_bytes > 0
    ((reason, count),) = found.fallbacks.items()
    assert "Python's random" in reason and count == 3
    assert "state: eager; 2 graphs in" in text and "update_kernel" in text
    assert re.search(
        r"graph 1: \(float64\[6, 4\] on cuda:0, 0\.5\): \d+ nodes, \d+ kernels, 4", text
    )
    assert re.search("eager 3 times: .*Python's random", text)
    with Warned():
        step(noise(6, 6, 4, device=device), 0.5)
    found = step.explain()
    assert found.state == "captured" and found.replays == 8
    assert found.key == "(float64[6, 4] on cuda:0, 0.5)"  # the one used last comes first


def test_reset(device):
    """Training goes on, and warms up and captures anew; results handed out stay."""
    twins = Twins(Net, ADAMW, mean_square, device)
    batches = noises(30, 6, 4, device=device)
    with Warned() as found:
        results = twins.run(batches[:8])
        values = [loss.item() for loss in results]
        for _ in range(2):  # the second one has nothing to do
            twins.step.reset()
        explained = twins.step.explain()
        assert (explained.state, explained.graphs, explained.pool_bytes) == ("eager", [], 0)
        assert not twins.step.captured and twins.step.inputs == ()
        results += twins.run(batches[8:16])
        twins.check_replays(*[False] * WARMUP, *[True] * 5)
        values += [loss.item() for loss in results[8:]]
        twins.step.reset()
        twins.run(batches[16:24])
    twins.check_replays(*[False] * WARMUP, *[True] * 5)
    assert [loss.item() for loss in results] == values
    expect_captures(found, device)
    twins.check()


def test_reset_amid_micro_batches(device):
    _, _, a, oa = net_pair(device)
    _, _, b, ob = net_pair(device)
    runs = []
    with Warned():
        for resets, model, optimizer in ((False, a, oa), (True, b, ob)):
            step = tr.TrainStep(mean_square(model), optimizer, accumulate=3)
            seed()
            losses = []
            for i, batch in enumerate(noises(18, 6, 4, device=device)):
                losses.append(step(*batch))
                if resets and i in (1, 7, 8):
                    step.reset()
            runs.append(torch.stack(losses))
    assert step.captured == (device == "cuda")
    close(runs[1], runs[0])
    same(a, b)
    same_state(oa, ob)


@only_cuda
@pytest.mark.parametrize("how", ["reset", "deleted"])
def test_memory_comes_back(how, device):
    if device != "cuda":
        pytest.skip("a CPU has no graphs")
    bystander = Bystander(device)
    _, _, model, optimizer = net_pair(device)

    def loss_fn(x):
        large = x.repeat(1 << 19, 2).sin()  # 200 MB
        return model(x).pow(2).mean() + large.mean() * 0

    step = tr.TrainStep(loss_fn, optimizer)
    x = noise(0, 6, 4, device=device)
    for _ in range(WARMUP):
        step(x)
    before = memory()
    loss = None
    for rows in (6, 6, 3, 3):
        loss = step(x[:rows])
    assert step.captured
    kept = loss.item()
    assert memory()[1] >= before[1] + (100 << 20)
    assert step.explain().pool_bytes >= 100 << 20
    if how == "reset":
        step.reset()
    else:
        del step
    after = memory()
    assert after[0] <= before[0] + CRUMBS
    assert after[1] <= before[1] + SEGMENT
    assert loss.item() == kept
    if how == "reset":
        for _ in range(WARMUP + 1):
            step(x)
        assert step.captured
    bystander.check()


# -- a loader at work ------------------------------------------------------------------------------


@only_cuda
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non_blocking"])
def test_a_data_loader_that_pins_memory_meanwhile(blocking, device):
    """Its thread calls CUDA while the step is being captured."""
    if device != "cuda":
        pytest.skip("pinned memory is a GPU's")
    x = torch.stack([noise(i, 4) for i in range(240)])
    loader = DataLoader(
        TensorDataset(x, x.sum(1, keepdim=True)),
        batch_size=6,
        pin_memory=True,
        num_workers=2,
        persistent_workers=True,
    )

    def loss_of(model):
        def loss_fn(x, y):
            x = x.to(device, non_blocking=not blocking)
            return F.mse_loss(model(x), y.to(device, non_blocking=not blocking))

        return loss_fn

    twins = Twins(mlp, ADAMW, loss_of, device)
    with Warned() as found:
        for _ in range(2):
            for x, y in loader:
                assert x.is_pinned()
                twins.run([(x, y)])
    twins.check_replays(*[True] * (80 - WARMUP))
    assert not found
    twins.check()


# -- what the constructor refuses ------------------------------------------------------------------


def refusals():
    numbers = [0, -1, True, 2.0, "3", None]
    for name in ("warmup", "max_graphs", "accumulate"):
        for value in numbers:
            yield {name: value}, ValueError, f"{name} must be an int >= 1, got {value!r}"
    yield {"loss_fn": 3}, TypeError, "loss_fn must be callable, got int"
    yield {"loss_fn": None}, TypeError, "loss_fn must be callable, got NoneType"
    yield {"model": "net"}, TypeError, "model must be an nn.Module, got str"
    yield {"model": nn.Linear}, TypeError, "model must be an nn.Module, got type"
    yield {"precision": "bf8"}, ValueError, "precision must be one of ['fp16', 'bf16'] or None"
    yield {"precision": "float32"}, ValueError, "got 'float32'"
    yield {"precision": torch.bfloat16}, ValueError, "got torch.bfloat16"
    yield {"scaler": 2.0**16}, TypeError, "scaler must be a torch.amp.GradScaler, got float"
    scaler = torch.amp.GradScaler("cpu")
    for precision in ("bf16", "fp16"):
        options = {"precision": precision, "scaler": scaler}
        yield options, ValueError, "pass either precision or scaler"


REFUSALS = list(refusals())
NAMES = [f"{'-'.join(options)}-{i}" for i, (options, _, _) in enumerate(REFUSALS)]


@pytest.mark.parametrize(("options", "error", "text"), REFUSALS, ids=NAMES)
def test_what_the_constructor_refuses(options, error, text, device):
    _, _, model, optimizer = net_pair(device)
    before = set(vars(optimizer))
    with pytest.raises(error, match=re.escape(text)) as raised:
        tr.TrainStep(**{"loss_fn": mean_square(model), "optimizer": optimizer, **options})
    assert str(raised.value).startswith("TrainStep: ")
    assert optimizer.amp is None and set(vars(optimizer)) == before


@pytest.mark.parametrize(
    "make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop], ids=lambda f: f.__name__
)
def test_an_optimizer_that_was_not_accelerated(make, device):
    model = Net().to(device)
    text = f"{make.__name__} is not one of ours; pass it through tr.accelerate(model, optimizer)"
    with pytest.raises(TypeError, match=re.escape(text)):
        tr.TrainStep(mean_square(model), make(model.parameters(), lr=0.1))


def test_what_is_no_optimizer(device):
    model = Net().to(device)
    for optimizer in (None, model, model.parameters()):
        with pytest.raises(TypeError, match=r"TrainStep: .* is not one of ours"):
            tr.TrainStep(mean_square(model), optimizer)
