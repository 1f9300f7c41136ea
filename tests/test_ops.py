# SPDX-License-Identifier: BSD-3-Clause
# Every op alone, from one list of samples: opcheck, values beside a float64 reference; and each
# refusal. The reference walks a tensor in the order of its memory, as the kernels do.

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from testing import DEVICES, FP64
from torch import Tensor

from torch_renaissance._ops import _C, ops
from torch_renaissance.regions import layout

pytestmark = pytest.mark.parametrize("device", DEVICES)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]

# Columns of the table of hyper-parameters, and the bits of its flags, as in csrc/math/hyper.h.
HYPER = ("lr", "weight_decay", "beta1", "beta2", "log_beta1", "log_beta2", "eps", "flags")
HYPER += ("lr_pointer", "lr_is_double")
FLAGS = {"maximize": 1, "decoupled": 2, "nesterov": 4, "amsgrad": 8}
STATE = {"sgd_": ["momentum_buffers"], "adam_": ["exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"]}

# Two segments: shapes of nothing, one element, odd, channels_last, and more than one chunk.
SHAPES = [[(0,), (), (7,), (33, 5), (2, 3, 4, 5)], [(4099,), (3, 701)]]
WITHOUT_GRADIENT = 3  # this slot, and the steps that its neighbours have taken:
STEPS = [[0, 1, 0, 3, 7], [0, 20]]
SLOTS = [s for s in range(7) if s != WITHOUT_GRADIENT]
ROWS = [0, 1, 0, 1, 1, 0]


def row(lr=0.1, weight_decay=0.0, beta1=0.0, beta2=0.0, eps=0.0, **flags):
    logs = torch.tensor([beta1, beta2], dtype=torch.float64).log().tolist()
    return [lr, weight_decay, beta1, beta2, *logs, eps, sum(FLAGS[f] for f in flags), 0.0, 0.0]


class Source:
    """Random tensors, the same for every device, from 0.1 to 1.1."""

    def __init__(self, device, dtype):
        self.to = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape):
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) + 0.1
        values = values.to(*self.to)
        return values.to(memory_format=torch.channels_last) if len(shape) == 4 else values


def tensors(device, dtype):
    """What all ops on slots take, and the sizes of the two segments' planes."""
    source = Source(device, dtype)
    shapes = [shape for segment in SHAPES for shape in segment]
    numels = [[torch.Size(shape).numel() for shape in segment] for segment in SHAPES]
    layouts = [layout(n, dtype.itemsize) for n in numels]
    chunks = [
        _C.chunk_table(n, offsets, dtype.itemsize).to(device)
        for n, (offsets, _) in zip(numels, layouts, strict=True)
    ]
    params, grads = ([source(*shapes[s]) for s in SLOTS] for _ in range(2))
    return source, params, [g.sub_(0.5) for g in grads], chunks, [size for _, size in layouts]


def update_arguments(
    op, rows, planes, device, dtype, scale=None, found_inf=None, counts_skips=True
):
    """Arguments of sgd_ or adam_. `planes`: how many the first and the second segment have."""
    source, params, grads, chunks, sizes = tensors(device, dtype)
    state = {
        name: [source(size if i < n else 0) for size, n in zip(sizes, planes, strict=True)]
        for i, name in enumerate(STATE[op])
    }
    scalar = partial(torch.full, (), dtype=torch.float32, device=device)
    return {
        "params": params,
        "grads": grads,
        **state,
        "steps": [torch.tensor(s, dtype=torch.float32, device=device) for s in STEPS],
        "counters": torch.tensor([0, 5, 7, 0, 0, 0], dtype=torch.int32, device=device),
        "chunks": chunks,
        "slots": SLOTS,
        "rows": ROWS,
        "hyper": torch.tensor(rows, dtype=torch.float64, device=device),
        "counts_skips": counts_skips,
        "grad_scale": None if scale is None else scalar(scale),
        "found_inf": None if found_inf is None else scalar(found_inf),
    }


def pack_arguments(device, dtype):
    source, params, grads, chunks, sizes = tensors(device, dtype)
    planes, counts = [source(size) for size in sizes], [len(segment) for segment in SHAPES]
    arguments = {"params": params, "grads": grads, "planes": planes, "chunks": chunks}
    return arguments | {"slots": SLOTS, "counts": counts}


def set_hyper_arguments(rows, device, dtype):
    hyper = torch.full((rows, _C.HYPER_COLUMNS), -1.0, dtype=torch.float64, device=device)
    return {"hyper": hyper, "values": [1 / (i + 1) for i in range(hyper.numel())]}


@dataclass(frozen=True)
class Sample:
    op: str
    name: str
    arguments: partial  # of device and dtype

    def __str__(self):
        return f"{self.op}{self.name}"


def update(op, name, rows, planes, **options):
    return Sample(op, name, partial(update_arguments, op, rows, planes, **options))


_adam = partial(row, beta1=0.9, beta2=0.99, eps=1e-3)
_sgd = partial(row, beta1=0.9)
SAMPLES = [
    update("adam_", "plain", [_adam(), _adam(lr=0.01)], (2, 2)),
    update("adam_", "decoupled", [_adam(weight_decay=0.3, decoupled=1), _adam()], (2, 2)),
    update("adam_", "coupled", [_adam(weight_decay=0.3), _adam(maximize=1)], (2, 2)),
    update("adam_", "small-betas", [_adam(beta1=0.0, beta2=0.5), _adam(beta1=0.5)], (2, 2)),
    update("adam_", "amsgrad", [_adam(amsgrad=1), _adam(amsgrad=1, maximize=1)], (3, 3)),
    # Group 1 has no tensor in the segment that lacks the third plane.
    update("adam_", "amsgrad-in-one-group", [_adam(), _adam(amsgrad=1)], (3, 3)),
    update("adam_", "plane-in-one-segment", [_adam(), _adam(weight_decay=0.1)], (2, 3)),
    update("adam_", "scaled", [_adam(), _adam()], (2, 2), scale=8.0, found_inf=0.0),
    update("adam_", "skipped", [_adam(), _adam()], (2, 2), scale=8.0, found_inf=1.0),
    update("sgd_", "plain", [row(), row(weight_decay=0.3)], (0, 0)),
    update("sgd_", "decoupled", [row(weight_decay=0.3, decoupled=1), row(maximize=1)], (0, 0)),
    update("sgd_", "momentum", [_sgd(), _sgd(weight_decay=0.3)], (1, 1)),
    update("sgd_", "dampening", [_sgd(beta2=0.5), _sgd(maximize=1)], (1, 1)),
    update("sgd_", "nesterov", [_sgd(nesterov=1), _sgd(nesterov=1, weight_decay=0.3)], (1, 1)),
    update("sgd_", "momentum-in-one-group", [row(), _sgd()], (1, 1)),
    update("sgd_", "plane-in-one-segment", [row(), row(weight_decay=0.1)], (0, 1)),
    update("sgd_", "scaled", [_sgd(), row()], (1, 1), scale=0.5),
    update("sgd_", "skipped", [_sgd(), row()], (1, 1), found_inf=2.0, counts_skips=False),
    Sample("pack_", "", pack_arguments),
    Sample("set_hyper_", "", partial(set_hyper_arguments, 2)),
    Sample("set_hyper_", "-in-pieces", partial(set_hyper_arguments, 901)),  # of 4000 values
]
SAMPLE_OF = {s.op: s for s in SAMPLES if str(s) in ("adam_plain", "sgd_momentum", "pack_")}


# In test_init_op.py, test_loss_graphs_compilers.py, test_augment_draw_batch.py and test_order.py.
OPCHECKED_ELSEWHERE = {"fill_random_", "set_debug"}
OPCHECKED_ELSEWHERE |= {"cross_entropy", "cross_entropy_forward", "cross_entropy_backward"}
OPCHECKED_ELSEWHERE |= {"augment", "augment_parameters", "draw_batch", "draw_batch_"}
OPCHECKED_ELSEWHERE |= {"order", "place_cursor_", "count_autocast_steps"}


def test_every_op_has_a_sample(device):
    prefix = "torch_renaissance::"
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)]
    assert {s.op for s in SAMPLES} | OPCHECKED_ELSEWHERE == {n.removeprefix(prefix) for n in names}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_opcheck(sample, device):
    arguments = tuple(sample.arguments(device, torch.float32).values())
    results = torch.library.opcheck(getattr(ops, sample.op).default, arguments)
    assert set(results.values()) == {"SUCCESS"} and len(results) == 4


# -- values ----------------------------------------------------------------------------------------


def each(f, value):
    """`f` of the tensors in lists and dicts; anything else as it is."""
    if isinstance(value, dict):
        return {k: each(f, v) for k, v in value.items()}
    if isinstance(value, list):
        return [each(f, v) for v in value]
    return f(value) if isinstance(value, Tensor) else value


def tensors_of(value):
    found = []
    each(found.append, value)
    return found


def flat(t):
    return t.as_strided((t.numel(),), (1,))


def places(chunks):
    """(segment, slot within it, offset in its planes) of each slot."""
    return [
        (segment, index, int(offset))
        for segment, table in enumerate(chunks)
        for index, offset in enumerate(table[table[:, 1] == 0, 0])
    ]


def adam_reference(h, flags, step, p, g, m, v, largest):
    p = p * (1 - h["lr"] * h["weight_decay"]) if "decoupled" in flags else p
    g = g if "decoupled" in flags else g + h["weight_decay"] * p
    m = h["beta1"] * m + (1 - h["beta1"]) * g
    v = h["beta2"] * v + (1 - h["beta2"]) * g * g
    largest = torch.maximum(largest, v) if "amsgrad" in flags else largest
    second = (largest if "amsgrad" in flags else v) / (1 - h["beta2"] ** step)
    p = p - h["lr"] * m / (1 - h["beta1"] ** step) / (second.sqrt() + h["eps"])
    return p, m, v, largest


def sgd_reference(h, flags, step, p, g, buffer):
    p = p * (1 - h["lr"] * h["weight_decay"]) if "decoupled" in flags else p
    g = g if "decoupled" in flags else g + h["weight_decay"] * p
    if h["beta1"] == 0:
        return p - h["lr"] * g, buffer
    buffer = g if step == 1 else h["beta1"] * buffer + (1 - h["beta2"]) * g
    return p - h["lr"] * (g + h["beta1"] * buffer if "nesterov" in flags else buffer), buffer


def update_expected(op, reference, a):
    if a["found_inf"] is not None and a["found_inf"] != 0:
        a["counters"][_C.SKIPPED] += a["counts_skips"]
        return
    where = places(a["chunks"])
    for param, grad, slot, r in zip(a["params"], a["grads"], a["slots"], a["rows"], strict=True):
        h = dict(zip(HYPER, a["hyper"][r].tolist(), strict=True))
        flags = {flag for flag, bit in FLAGS.items() if int(h["flags"]) & bit}
        segment, index, offset = where[slot]
        if a["grad_scale"] is not None:
            grad /= a["grad_scale"]
        g = -flat(grad) if "maximize" in flags else flat(grad)
        planes = [a[name][segment] for name in STATE[op]]
        state = [s[offset : offset + g.numel()] if s.numel() else g * 0 for s in planes]
        step = a["steps"][segment][index] + 1
        p, *new = reference(h, flags, step, flat(param), g, *state)
        flat(param).copy_(p)
        for old, value in zip(state, new, strict=True):
            old.copy_(value)
        if op == "adam_" or h["beta1"] != 0:
            a["steps"][segment][index] = step


def pack_expected(a):
    grads = dict(zip(a["slots"], a["grads"], strict=True))
    numels = [torch.Size(shape).numel() for segment in SHAPES for shape in segment]
    for slot, (segment, _, offset) in enumerate(places(a["chunks"])):
        part = a["planes"][segment][offset : offset + numels[slot]]
        part.copy_(flat(grads[slot]) if slot in grads else torch.zeros_like(part))


def set_hyper_expected(a):
    flat(a["hyper"]).copy_(torch.tensor(a["values"], dtype=torch.float64))


EXPECTED = {
    "adam_": partial(update_expected, "adam_", adam_reference),
    "sgd_": partial(update_expected, "sgd_", sgd_reference),
    "pack_": pack_expected,
    "set_hyper_": set_hyper_expected,
}


def close_to(value, exact, name, dtype):
    """fp32 arithmetic rounds some ten times at 6e-8, of values up to 4; a 16-bit result is rounded
    once more, by half an ulp. What is not of the tensors' dtype must be exact."""
    bound = FP64 if dtype == torch.float64 else 2.5e-6
    half_an_ulp = torch.finfo(dtype).eps / 2 if dtype.itemsize == 2 else 0
    exactly = value.dtype != dtype or name in ("steps", "hyper", "counters")
    rtol, atol = (0, 0) if exactly else (bound + half_an_ulp, bound)
    torch.testing.assert_close(
        value.double(), exact.double(), rtol=rtol, atol=atol, msg=lambda m: f"{name}: {m}"
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_values(sample, dtype, device):
    given = sample.arguments(device, dtype)
    exact = each(lambda t: t.double() if t.is_floating_point() else t.clone(), given)
    EXPECTED[sample.op](exact)
    getattr(ops, sample.op)(*given.values())
    for name in given:
        for value, one in zip(tensors_of(given[name]), tensors_of(exact[name]), strict=True):
            close_to(value, one, name, dtype)


@pytest.mark.parametrize("lr_dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("op", ["adam_", "sgd_"])
def test_lr_is_read_through_its_address(op, lr_dtype, device):
    results = []
    lr = torch.tensor(0.25, dtype=lr_dtype, device=device)
    for pointer in (False, True):
        a = SAMPLE_OF[op].arguments(device, torch.float32)
        a["hyper"][:, HYPER.index("lr")] = 123.0 if pointer else 0.25
        if pointer:
            a["hyper"][:, HYPER.index("lr_pointer")] = lr.data_ptr()
            a["hyper"][:, HYPER.index("lr_is_double")] = lr_dtype == torch.float64
        getattr(ops, op)(*a.values())
        results.append(a["params"])
    assert all(map(torch.equal, *results))


# -- refusals --------------------------------------------------------------------------------------

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
