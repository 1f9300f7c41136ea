# SPDX-License-Identifier: BSD-3-Clause
# Every op alone, from one list of samples: opcheck, and values beside a float64 reference, which
# walks a tensor in the order of its memory, as the kernels do.

from functools import partial

import pytest
import torch
from op_samples import (
    DTYPES,
    FLAGS,
    HYPER,
    SAMPLE_OF,
    SAMPLES,
    SHAPES,
    STATE,
    each,
    tensors_of,
)
from testing import DEVICES, FP64

from torch_renaissance._ops import _C, ops

pytestmark = pytest.mark.parametrize("device", DEVICES)

# In test_init_op.py, test_loss_graphs_compilers.py, test_augment_draw_batch.py, test_order.py and
# test_compiled_ops.py.
OPCHECKED_ELSEWHERE = {"fill_random_", "set_debug"}
OPCHECKED_ELSEWHERE |= {"cross_entropy", "cross_entropy_forward", "cross_entropy_backward"}
OPCHECKED_ELSEWHERE |= {"augment", "augment_parameters", "draw_batch", "draw_batch_"}
OPCHECKED_ELSEWHERE |= {"order", "place_cursor_", "count_autocast_steps", "count_batches_"}
OPCHECKED_ELSEWHERE |= {"batch_norm_forward", "batch_norm_backward", "column_sums"}
OPCHECKED_ELSEWHERE |= {"bias_gelu", "bias_gelu_backward", "pack_heads"}
OPCHECKED_ELSEWHERE |= {"layer_norm_forward", "layer_norm_backward"}
OPCHECKED_ELSEWHERE |= {"max_pool2d_forward", "max_pool2d_backward"}


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
