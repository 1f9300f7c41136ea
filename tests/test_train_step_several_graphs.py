# SPDX-License-Identifier: BSD-3-Clause
# What gets a graph of its own: inputs of another shape, dtype or layout, and torch's switches; and
# what happens where there are more of them than graphs.

import warnings
from contextlib import contextmanager

import pytest
import torch
from stepping import (
    ADAMW,
    NESTEROV,
    Twins,
    captured_twins,
    each_row,
    fallbacks,
    graphs,
    mean_square,
    no_fallback,
    noise,
    noises,
)
from testing import DEVICES, Optimizer, close, conv_bn, mlp

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), no_fallback]


# -- inputs ----------------------------------------------------------------------------------------

INPUTS = {
    "smaller": lambda x: x[:3],
    "larger": lambda x: x.repeat(2, 1),
    "one row": lambda x: x[:1],
    "float32": lambda x: x.float(),
    "float16": lambda x: x.half(),
    "transposed": lambda x: x.t().contiguous().t(),
    "with gaps": lambda x: x.repeat(1, 2)[:, ::2],
    "one more dimension": lambda x: x[None],
    "no rows": lambda x: x[:0],
}


@each_row
@pytest.mark.parametrize("other", INPUTS.values(), ids=INPUTS)
def test_other_inputs_get_a_graph_of_their_own(other, row, device):
    def loss_of(model):
        return lambda x: (model(x.double()).pow(2).sum(), x.sum())

    batches = noises(24, 6, 4, device=device)
    twins = captured_twins(mlp, row, loss_of, device, batches)
    others = [(other(x),) for (x,) in batches]
    twins.run(others[6:11])
    twins.check_replays(False, True, True, True, True)
    twins.run(batches[11:13] + others[13:15] + batches[15:17])  # both graphs are kept
    twins.check_replays(*[True] * 6)
    assert graphs(twins) == 2 * (device == "cuda")
    twins.check()


def test_the_last_batch_of_an_epoch(device):
    """Seen once an epoch, it runs eagerly once and is captured the next time."""
    twins = Twins(mlp, ADAMW, mean_square, device)
    for epoch in range(4):
        twins.run(
            [
                *noises(5, 6, 4, device=device, first=10 * epoch),
                (noise(epoch, 2, 4, device=device),),
            ]
        )
    twins.check_replays(*[False] * 3, *[True] * 2, False, *[True] * 18)
    twins.check()


# -- torch's switches ------------------------------------------------------------------------------


def with_out(model):
    def loss_fn(x):
        out = model(x)
        return out.float().pow(2).mean(), (out, torch.is_grad_enabled())

    return loss_fn


@each_row
def test_autocast_of_the_program(row, device):
    """A model in float32; the dtype of what it returns tells whether autocast was on."""
    twins = Twins(mlp, row, with_out, device, torch.float32)
    batches = iter(noises(40, 6, 4, device=device, dtype=torch.float32))

    def run(n, dtype):
        for _ in range(n):  # entered for each step: torch's cast weights are kept until it is left
            with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
                # Rounding to 16 bits may fall to the other side.
                ((_, (out, _)),) = twins.run([next(batches)], rtol=3e-2, atol=3e-2)
            assert out.dtype == dtype

    run(6, torch.float32)
    twins.check_replays(True, True, True)
    for dtype in (torch.bfloat16, torch.float16):
        run(5, dtype)
        twins.check_replays(False, True, True, True, True)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        run(2, dtype)
        twins.check_replays(True, True)


def test_weights_are_cast_anew_under_autocast(device):
    """Autocast keeps its casts of weights until it is left; an update makes them stale."""
    twins = Twins(
        mlp,
        Optimizer(torch.optim.SGD, tr.optim.SGD, {"lr": 0.5}),
        mean_square,
        device,
        torch.float32,
    )
    x = noise(0, 6, 4, device=device, dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16):
        losses = [twins.step(x).item() for _ in range(8)]
    assert len(set(losses)) == len(losses)
    assert twins.step.captured == (device == "cuda")


@each_row
def test_grad_mode(row, device):
    """Under no_grad the step trains all the same, and leaves the mode as it was."""
    batches = noises(30, 6, 4, device=device)
    twins = captured_twins(mlp, row, mean_square, device, batches)
    with torch.no_grad():
        for batch in batches[6:11]:
            with torch.enable_grad():
                expected = twins.native(*batch)
            close(twins.step(*batch), expected)
            assert not torch.is_grad_enabled()
            twins.replayed.append(twins.step.captured)
        twins.check_replays(True)
    twins.run(batches[11:13])
    twins.check_replays(True, True)
    twins.check()


def cudnn(**flags):
    names = ("enabled", "benchmark", "deterministic", "allow_tf32")
    now = {name: getattr(torch.backends.cudnn, name) for name in names}
    return torch.backends.cudnn.flags(**(now | flags))


@contextmanager
def matmul_precision(name):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic():
    """With a warning only, since some kernels ask for a variable of the environment."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SWITCHES = {
    "cudnn.enabled": lambda: cudnn(enabled=False),
    "cudnn.deterministic": lambda: cudnn(deterministic=True),
    "cudnn.benchmark": lambda: cudnn(benchmark=True),
    "float32 precision": lambda: matmul_precision("medium"),
    "deterministic algorithms": deterministic,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
}


@pytest.mark.parametrize("switch", SWITCHES.values(), ids=SWITCHES)
def test_switches_of_torch_get_graphs_of_their_own(switch, device):
    """Other kernels may be behind them, which a replay would not notice."""
    batches = noises(30, 6, 3, 8, 8, device=device)
    with matmul_precision("highest"):  # to torch, set is not the same as never set
        twins = captured_twins(conv_bn, NESTEROV, mean_square, device, batches)
        with warnings.catch_warnings(), switch():
            warnings.filterwarnings("ignore", ".*(deterministic|Anomaly)")
            twins.run(batches[6:10])
            twins.check_replays(False, True, True, True)
        twins.run(batches[10:12])
        twins.check_replays(True, True)
    assert graphs(twins) == 2 * (device == "cuda")
    twins.check()


# -- many graphs -----------------------------------------------------------------------------------


def test_more_shapes_than_graphs(device):
    twins = Twins(mlp, ADAMW, mean_square, device, max_graphs=2)
    with fallbacks(device) as messages:
        for i in range(8):
            twins.run([(noise(i, n, 4, device=device),) for n in (3, 4, 5, 6)])
    if device == "cuda":
        assert messages == ["TrainStep runs eagerly: all 2 graphs (max_graphs) are in use"]
        twins.check_replays(*[True, True, False, False] * 4)
        found = twins.step.explain()
        assert len(found.graphs) == 2
        assert found.fallbacks["all 2 graphs (max_graphs) are in use"] >= 8
    twins.check()


def test_a_graph_that_idles_makes_room(device):
    """The one used longest ago, and only after 100 calls without it."""
    twins = Twins(mlp, NESTEROV, mean_square, device, max_graphs=2)
    x, y, z = ((noise(i, 3 + i, 4, device=device),) for i in range(3))
    with fallbacks(device) as messages:
        twins.run([x] * 5 + [y] * 3)
        twins.check_replays(False, False, False, True, True, False, True, True)
        twins.run([z] * 60 + [y] * 10)
        assert not any(twins.replayed[-70:-10])
        twins.check_replays(*[True] * 10)
        twins.run([z] * 40)  # x has been idle for more than 100 calls, y has not
        assert twins.replayed[-1] == (device == "cuda")
        twins.run([y, z])
        twins.check_replays(True, True)
        twins.run([x, x])  # again one too many
        twins.check_replays(False, False)
    assert len(messages) == (device == "cuda")
    assert graphs(twins) == 2 * (device == "cuda")
    twins.check()
