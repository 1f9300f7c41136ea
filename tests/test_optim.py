# SPDX-License-Identifier: BSD-3-Clause
# The numbers of tr.optim against torch.optim, for all options, shapes, layouts and dtypes; each
# training also hands its state to torch's optimizer and back.

import copy
import dataclasses
import itertools

import pytest
import torch
from testing import (
    DEVICES,
    FP64,
    GRADIENTS,
    LOW_PRECISION,
    OPTIMIZERS,
    USUAL,
    equal,
    parameters,
    same_state,
    set_gradients,
    skip_where_torchs_fused_is_wrong,
    train,
    values_of,
    worst,
)
from torch import nn

import torch_renaissance as tr

pytestmark = pytest.mark.parametrize("device", DEVICES)
each_optimizer = pytest.mark.parametrize("row", OPTIMIZERS, ids=str)


def both_ways(row, device, dtype, ours, params):
    """Hand the state of a training to torch's optimizer and back, and go on with each of them."""
    runs = [(ours, params)]
    for make, source in ((row.native, ours), (row.ours, None)):
        others = parameters(device, dtype, plain=row.plain)
        for p, q in zip(others, params, strict=True):
            p.data.copy_(q.data)
        optimizer = make(others, **row.options)
        optimizer.load_state_dict(copy.deepcopy((source or runs[-1][0]).state_dict()))
        runs.append((optimizer, others))
    for optimizer, others in runs:
        train(optimizer, others, range(200, 204), plain=row.plain)
        same_state(runs[0][0], optimizer, values=False)
    return [values_of(others) for _, others in runs]


@pytest.mark.parametrize(
    ("row", "gradients"),
    [(row, None) for row in OPTIMIZERS] + [(row, how) for row in USUAL for how in GRADIENTS],
    ids=str,
)
def test_fp64_equals_torch_after_100_steps(row, gradients, device):
    native, ours = (parameters(device, torch.float64, plain=row.plain) for _ in "ab")
    torchs = row.native(native, **row.options)
    if gradients is None:
        optimizer = row.ours(ours, **row.options)
    else:
        optimizer = row.native(ours, **row.options)
        tr.accelerate(nn.ParameterList(ours), optimizer, gradients=gradients)
    train(torchs, native, range(100), plain=row.plain)
    train(optimizer, ours, range(100), plain=row.plain)
    assert worst(ours, native) <= FP64
    same_state(torchs, optimizer, values=False)
    for p, q in zip(native, ours, strict=True):
        assert torchs.state[p].keys() == optimizer.state[q].keys()
        for key, value in torchs.state[p].items():
            assert worst([optimizer.state[q][key].cpu()], [value.cpu()]) <= FP64
    continued = both_ways(row, device, torch.float64, optimizer, ours)
    assert max(worst(values, continued[0]) for values in continued) <= FP64


@each_optimizer
def test_fp32_error_is_at_most_twice_torchs(row, device):
    runs = {}
    for name, make, dtype in (
        ("exact", row.native, torch.float64),
        ("torch", row.native, torch.float32),
        ("ours", row.ours, torch.float32),
    ):
        params = parameters(device, dtype, plain=row.plain)
        optimizer = make(params, **row.options)
        train(optimizer, params, range(30), plain=row.plain)
        runs[name] = torch.cat([p.detach().double().flatten() for p in params])
    error = {name: (runs[name] - runs["exact"]).norm() for name in ("torch", "ours")}
    assert error["ours"] <= 2 * error["torch"]
    continued = both_ways(row, device, torch.float32, optimizer, params)
    assert max(worst(values, continued[0]) for values in continued) <= 1e-5


def ordered(x):
    """Integers that number the 16-bit floats in order, so that neighbours differ by one."""
    bits = x.detach().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def within_one_ulp(x, y, before):
    """One step in the last place, or, where terms cancel, the fp32 rounding of these terms: some
    ten roundings on either side, each of half an eps."""
    if not y.numel():
        return True
    neighbours = (ordered(x) - ordered(y)).abs() <= 1
    rounding = 10 * torch.finfo(torch.float32).eps * (y.float().abs().max() + before)
    return bool((neighbours | ((x.float() - y.float()).abs() <= rounding)).all())


@pytest.mark.parametrize("dtype", LOW_PRECISION, ids=str)
@each_optimizer
def test_low_precision_is_within_one_ulp_of_torchs_fused(row, dtype, device):
    skip_where_torchs_fused_is_wrong(row.native, device, dtype)
    options = {key: value for key, value in row.options.items() if key != "foreach"}
    row = dataclasses.replace(row, options=options | {"fused": True})
    options = row.options
    if row.native is not torch.optim.SGD:
        options.setdefault("eps", 1e-3)  # the usual 1e-8 is zero in fp16
    native, ours = (parameters(device, dtype, plain=True) for _ in "ab")
    torchs, optimizer = row.native(native, **options), row.ours(ours, **options)
    for step in range(12):
        before = [float(p.detach().abs().max()) if p.numel() else 0.0 for p in native]
        for params, each in ((native, torchs), (ours, optimizer)):
            set_gradients(params, step, plain=True, dtype=dtype)
            each.step()
        for p, q, largest in zip(native, ours, before, strict=True):
            kept = [(p.data, q.data)]
            kept += [(value, optimizer.state[q][key]) for key, value in torchs.state[p].items()]
            for theirs, mine in kept:
                if theirs.dtype == dtype:
                    assert not theirs.isnan().any()
                    assert within_one_ulp(mine, theirs, largest)
                    mine.copy_(theirs)  # the next step starts from equal values
    continued = both_ways(row, device, dtype, optimizer, ours)
    assert max(worst(values, continued[0]) for values in continued) <= 2**-6


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW_PRECISION], ids=str)
@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_groups_keep_their_own_numbers_and_parameters_their_own_steps(usual, dtype, device):
    skip_where_torchs_fused_is_wrong(usual.native, device, dtype)
    runs = []
    for make in (usual.native, usual.ours):
        params = parameters(device, dtype, plain=True)
        groups = [{"params": params[i::3], "lr": 0.01 * (i + 1)} for i in range(3)]
        groups[1]["weight_decay"], groups[2]["maximize"] = 0.0, True
        optimizer = make(groups, **usual.options | {"fused": True})
        train(optimizer, params, range(7), plain=True, dtype=dtype)
        runs.append((optimizer, params))
    (torchs, native), (optimizer, ours) = runs
    seven_steps = {torch.float64: FP64, torch.float32: 1e-6}.get(dtype, 7 * torch.finfo(dtype).eps)
    assert worst(ours, native) <= seven_steps
    same_state(torchs, optimizer, values=False)
    if "step" in torchs.state[native[0]]:
        counts = [float(torchs.state[p]["step"]) for p in native]
        assert [float(optimizer.state[p]["step"]) for p in ours] == counts
        assert len(set(counts)) > 1


@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_fused_true_takes_gradients_of_any_layout(usual, device):
    """torch's fused kernels raise, or on a CPU read them in the wrong order."""
    runs = []
    for make, options in ((usual.native, {}), (usual.ours, {"fused": True})):
        params = parameters(device, torch.float64, plain=True)
        train(make(params, **usual.options, **options), params, range(12))
        runs.append(params)
    assert worst(runs[1], runs[0]) <= FP64


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_adam_follows_its_formula(dtype, device):
    bounds = {
        torch.float64: {"rtol": 1e-10, "atol": 1e-12},
        torch.float32: {"rtol": 2e-5, "atol": 1e-6},
    }
    for name, decay, eps, amsgrad, maximize in itertools.product(
        ("Adam", "AdamW"), (None, 0.0, 0.3), (1e-8, 0.1), (False, True), (False, True)
    ):
        options = {"lr": 0.05, "eps": eps, "amsgrad": amsgrad, "maximize": maximize}
        options |= {"betas": (0.8, 0.95)} | ({} if decay is None else {"weight_decay": decay})
        p = nn.Parameter(torch.linspace(-3, 3, 5, dtype=dtype, device=device))
        optimizer = getattr(tr.optim, name)([p], **options)
        w, m, v, largest = p.detach().double().clone(), 0, 0, torch.zeros(5, device=device)
        decay = {"Adam": 0.0, "AdamW": 0.01}[name] if decay is None else decay
        for t, scale in enumerate((1.0, 1e-4, 10.0, -1e-3), 1):
            gradient = torch.arange(1.0, 6.0, dtype=torch.float64, device=device) * scale
            p.grad = gradient.to(dtype)
            optimizer.step()
            g = -gradient if maximize else gradient
            if name == "AdamW":
                w = w * (1 - 0.05 * decay)
            else:
                g = g + decay * w
            m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
            largest = torch.maximum(largest, v)
            root = ((largest if amsgrad else v) / (1 - 0.95**t)).sqrt()
            w = w - 0.05 * m / (1 - 0.8**t) / (root + eps)
        torch.testing.assert_close(p.detach().double(), w, **bounds[dtype])


@pytest.mark.parametrize("usual", USUAL[1:], ids=str)
def test_bias_correction_ends_at_one(usual, device):
    runs = []
    for make in (usual.native, usual.ours):
        params = parameters(device, torch.float32)
        optimizer = make(params, **usual.options)
        train(optimizer, params, range(5))
        for state in optimizer.state.values():
            state["step"].fill_(1e6)
        train(optimizer, params, range(5, 9))
        runs.append(params)
    assert worst(runs[1], runs[0]) <= 1e-6


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("maximize", [False, True])
def test_decoupled_decay_of_sgd(momentum, maximize, device):
    p = nn.Parameter(torch.linspace(-3, 3, 5, dtype=torch.float64, device=device))
    options = {"lr": 0.1, "momentum": momentum, "weight_decay": 0.3, "maximize": maximize}
    optimizer = tr.optim.SGD([p], **options, decoupled_weight_decay=True)
    w, m = p.detach().clone(), 0
    for t in range(6):
        if t == 3:  # the option travels with a copy
            p, optimizer = copy.deepcopy((p, optimizer))
        p.grad = torch.arange(1.0, 6.0, dtype=torch.float64, device=device) - t
        m = momentum * m + p.grad
        optimizer.step()
        w = w * (1 - 0.1 * 0.3) + (0.1 if maximize else -0.1) * m
    torch.testing.assert_close(p.detach(), w, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *LOW_PRECISION], ids=str)
@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_two_runs_are_bitwise_equal(usual, dtype, device):
    options = usual.options
    if usual.native is not torch.optim.SGD:
        options = options | {"eps": 1e-3}  # the usual 1e-8 is zero in fp16
    runs = []
    for _ in range(2):
        params = parameters(device, dtype)
        optimizer = usual.ours(params, **options)
        train(optimizer, params, range(5))
        state = [value for p in params for value in optimizer.state[p].values()]
        runs.append([*values_of(params), *state])
    assert equal(*runs)


@pytest.mark.parametrize("usual", USUAL, ids=str)
def test_more_tensors_and_groups_than_one_launch_may_take(usual, device):
    runs = []
    for make in (usual.native, usual.ours):
        params = [nn.Parameter(p.detach().double()) for p in torch.ones(1400, 2).to(device)]
        optimizer = make(params[:1300], **usual.options)
        for i in range(25):  # one by one, and some of other needs
            own = {"lr": 0.01 * (i + 1)} | (
                {"amsgrad": i % 2 == 0} if "eps" in optimizer.defaults else {}
            )
            optimizer.add_param_group({"params": params[1300 + 4 * i : 1304 + 4 * i], **own})
            if i % 8 == 0:
                train(optimizer, params, range(i, i + 1))
        train(optimizer, params, range(30, 33))
        if make is usual.ours:
            before, optimizer.found_inf = values_of(params), torch.ones((), device=device)
            optimizer.step()
            assert equal(params, before) and int(optimizer.skipped_steps) == 1
        runs.append(([torch.cat([p.detach() for p in params])], optimizer))
    assert worst(runs[1][0], runs[0][0]) <= FP64
    same_state(runs[0][1], runs[1][1])
