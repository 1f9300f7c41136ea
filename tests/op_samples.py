# SPDX-License-Identifier: BSD-3-Clause
# Arguments of every op that updates or packs, and the list of samples that its tests share.

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torch_renaissance._ops import _C
from torch_renaissance.regions import layout

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
