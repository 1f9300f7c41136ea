# SPDX-License-Identifier: BSD-3-Clause
# What each op refuses, by its message.

import pytest
import torch
from op_samples import (
    SAMPLE_OF,
    STATE,
    each,
    set_hyper_arguments,
    tensors_of,
)
from testing import DEVICES
from torch import Tensor

from torch_renaissance._ops import _C, ops

pytestmark = pytest.mark.parametrize("device", DEVICES)

ALL, UPDATES = ("adam_", "sgd_", "pack_"), ("adam_", "sgd_")
HERE = "(cpu|cuda:0)"


def with_last(f):
    """Changes a list's last tensor, on the device where it is."""
    return lambda values: [*values[:-1], f(values[-1])]


def gaps(t):
    return torch.stack([t, t], dim=-1)[..., 0]


# Ops, the argument that is wrong, what becomes of it, the message.
REFUSALS = [
    (ALL, "grads", lambda x: x[:-1], "got 6 params, 5 grads and 6 slots"),
    (ALL, "slots", lambda x: x[:-1], "got 6 params, 6 grads and 5 slots"),
    (ALL, "slots", lambda x: [*x[:-1], 7], r"slots\[5\] is 7, expected 0 to 6"),
    (ALL, "slots", lambda x: [-1, *x[1:]], r"slots\[0\] is -1, expected 0 to 6"),
    (
        ALL,
        "params",
        lambda x: [p.long() for p in x],
        "dtype Long is not supported; use float32, float64, float16 or bfloat16",
    ),
    (
        ALL,
        "params",
        with_last(Tensor.double),
        rf"params\[5\] is Double on {HERE}, expected Float on {HERE}",
    ),
    (
        ALL,
        "grads",
        with_last(Tensor.bfloat16),
        rf"grads\[5\] is BFloat16 on {HERE}, expected Float on {HERE}",
    ),
    (
        ALL,
        "grads",
        with_last(Tensor.t),
        r"grads\[5\] has shape \[701, 3\], expected \[3, 701\]",
    ),
    (
        ALL,
        "planes",
        with_last(Tensor.half),
        rf"planes\[1\] is Half on {HERE}, expected Float on {HERE}",
    ),
    (ALL, "planes", with_last(gaps), r"planes\[1\] must be contiguous"),
    (ALL, "chunks", lambda x: x[:-1], "got 1 chunk tables for 2 segments, at most 16"),
    (ALL, "counts", lambda x: x[:-1], "got 2 chunk tables for 1 segments, at most 16"),
    *(
        (
            ALL,
            "chunks",
            with_last(change),
            rf"chunks\[1\] must be a contiguous int64 tensor \[n, 3\] on {HERE}",
        )
        for change in (Tensor.int, gaps, Tensor.flatten, lambda t: t[:, :2].contiguous())
    ),
    (UPDATES, "rows", lambda x: x[:-1], "got 5 rows for 6 params"),
    (UPDATES, "rows", lambda x: [*x[:-1], 2], r"rows\[5\] is 2, expected 0 to 1"),
    (UPDATES, "rows", lambda x: [-1, *x[1:]], r"rows\[0\] is -1, expected 0 to 1"),
    *(
        (UPDATES, "steps", with_last(change), rf"steps\[1\] must be contiguous float32 on {HERE}")
        for change in (Tensor.double, gaps)
    ),
    *(
        (UPDATES, "counters", change, f"counters must be 6 int32 on {HERE}")
        for change in (Tensor.long, lambda t: t[:1])
    ),
    *(
        (
            UPDATES,
            "hyper",
            change,
            rf"hyper must be a contiguous float64 tensor \[rows, 10\] on {HERE}",
        )
        for change in (Tensor.float, gaps, Tensor.flatten, lambda t: t[:, :9].contiguous())
    ),
    *(
        (UPDATES, name, lambda t, f=f: f(t), f"{name} must be one float32 on {HERE}, got {got}")
        for name in ("grad_scale", "found_inf")
        for f, got in ((Tensor.double, "1 of Double"), (lambda t: t.expand(2), "2 of Float"))
    ),
]


def sample_for_refusals(op, device):
    options = {} if op == "pack_" else {"scale": 1.0, "found_inf": 0.0}
    return SAMPLE_OF[op].arguments(device, torch.float32, **options)


def name_of(op, argument):
    """What an op calls its first list of planes, and what tells it how many slots segments have."""
    names = {"planes": STATE[op][0], "counts": "steps"} if op in STATE else {}
    return names.get(argument, argument)


def refuses(op, a, message):
    """The call raises `message` and changes nothing."""
    real = [t for t in tensors_of(a) if t.device.type != "meta"]
    before = [t.clone() for t in real]
    with pytest.raises(RuntimeError, match=message):
        getattr(ops, op)(*a.values())
    assert all(map(torch.equal, real, before))


@pytest.mark.parametrize(
    ("op", "argument", "change", "message"),
    [(op, *rest) for ops_, *rest in REFUSALS for op in ops_],
)
def test_refusals(op, argument, change, message, device):
    a = sample_for_refusals(op, device)
    name = name_of(op, argument)
    a[name] = change(a[name])
    refuses(op, a, f"^{op}: {message}")


@pytest.mark.parametrize("op", ALL)
def test_another_device_is_refused_in_every_argument(op, device):
    names = [name for name, value in sample_for_refusals(op, device).items() if tensors_of(value)]
    assert len(names) >= 4
    for name in names:
        a = sample_for_refusals(op, device)
        if isinstance(a[name], list):
            a[name][-1] = a[name][-1].to("meta")
        else:
            a[name] = a[name].to("meta")
        refuses(op, a, f"^{op}: .*meta")


@pytest.mark.parametrize("op", ALL)
def test_too_many_segments(op, device):
    a = SAMPLE_OF[op].arguments(device, torch.float32)
    many = _C.MAX_SEGMENTS + 1
    a["chunks"] = [a["chunks"][0]] * many
    counts = name_of(op, "counts")
    a[counts] = [a[counts][0]] * many
    refuses(op, a, f"^{op}: got 17 chunk tables for 17 segments, at most 16")


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda t: t[:1], "10 of Double"),
        (Tensor.float, "20 of Float"),
        (Tensor.t, "20 of Double"),
    ],
)
def test_set_hyper_refusals(change, got, device):
    a = set_hyper_arguments(2, device, None)
    a["hyper"] = change(a["hyper"])
    message = f"^set_hyper_: got 20 values for {got}; expected a contiguous float64 tensor"
    refuses("set_hyper_", a, message)


@pytest.mark.parametrize("op", ALL)
def test_nothing_to_do(op, device):
    a = SAMPLE_OF[op].arguments(device, torch.float32)
    a["params"], a["grads"], a["slots"] = [], [], []
    if op != "pack_":
        a["rows"] = []
    before = each(Tensor.clone, tensors_of(a))
    getattr(ops, op)(*a.values())
    assert all(map(torch.equal, tensors_of(a), before))


@pytest.mark.parametrize("op", ALL)
def test_most_tensors_of_a_launch(op, device):
    """On a GPU a launch has room for so many; a CPU takes any number."""
    a = SAMPLE_OF[op].arguments(device, torch.float32)
    many = _C.MAX_SLOTS + 1
    a["chunks"] = [_C.chunk_table([0] * many, [0] * many, 4).to(device)]
    a[name_of(op, "counts")] = [many if op == "pack_" else torch.zeros(many, device=device)]
    for key, value in a.items():  # the sample has two segments, this launch one
        if key in {*STATE.get(op, []), "planes"}:
            a[key] = [torch.cat(value)]
    if device == "cpu":
        getattr(ops, op)(*a.values())
    else:
        refuses(op, a, "^a launch takes at most 1216 tensors, got 1217")
