# SPDX-License-Identifier: BSD-3-Clause
# Whether arguments and torch's global switches are those of the capture, and what is said of those
# that aren't.

import weakref

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from watching import Mine, each_device

from torch_renaissance._ops import _C

# -- signatures ------------------------------------------------------------------------------------


@each_device
def test_signature_is_read_as_a_list(device):
    x, y = torch.zeros(200, 784, device=device), torch.zeros(200, dtype=torch.long, device=device)
    signature = _C.Signature((x, y, 0.5, None, "mean", nn.Linear(1, 1)))
    on = f"on {x.device}"
    assert str(signature) == f"float32[200, 784] {on}, int64[200] {on}, 0.5, None, 'mean', a Linear"
    image = torch.zeros(2, 3, 4, 5, device=device).to(memory_format=torch.channels_last)
    weight = nn.Parameter(y.double())
    assert str(_C.Signature((image, weight))) == (
        f"float32[2, 3, 4, 5] with strides [60, 1, 15, 3] {on}, "
        f"Parameter float64[200] {on} (requires grad)"
    )
    assert str(_C.Signature(())) == ""


X = torch.zeros(4, 3)


@pytest.mark.parametrize(
    "was, now, fits",
    [
        (X, torch.ones(4, 3), True),
        (X, torch.zeros(8, 3)[4:], True),
        (X, torch.zeros(3, 4), False),
        (X, torch.zeros(3, 4).t(), False),
        (X, torch.zeros(4, 3, 1), False),
        (X, X.double(), False),
        (X, X.to("meta"), False),
        (X, X.to_sparse(), False),
        (X, X.clone().requires_grad_(), False),
        (X, X.clone().requires_grad_() * 1, False),
        (X, nn.Parameter(X, requires_grad=False), False),
        (X, X.as_subclass(Mine), False),
        (X, None, False),
        (None, X, False),
        (X * 1j, X * 1j, True),
        (X * 1j, (X * 1j).conj(), False),
        ((X * 1j).imag, (X * 1j).conj().imag, False),
        (0.5, float("0.5"), True),
        (0.5, 0.25, False),
        (1, True, False),
        (1, 1.0, False),
        (None, None, True),
        ("mean", "sum", False),
        (print, print, True),
        ([1], [1], False),
    ],
    ids=str,
)
def test_signature_fits(was, now, fits):
    signature = _C.Signature((was, 1))
    assert signature.fits((was, 1))
    assert signature.fits((now, 1)) == fits
    assert not signature.fits((now,))
    assert not signature.fits((was, 1, None))


def test_signature_keeps_no_batch():
    x = torch.zeros(4)
    signature = _C.Signature((x,))
    batch = weakref.ref(x)
    del x
    assert batch() is None
    assert signature.fits((torch.ones(4),))


# -- global switches -------------------------------------------------------------------------------


class FunctionMode(TorchFunctionMode):
    pass


class DispatchMode(TorchDispatchMode):
    pass


CONTEXTS = [
    (torch.no_grad, "grad mode was on, is off"),
    (torch.inference_mode, " was o"),  # grad mode on or inference mode off
    (lambda: torch.autocast("cpu", torch.bfloat16), "autocast on the CPU was off, is on"),
    (
        lambda: torch.autocast("cpu", torch.float16, enabled=False),
        "autocast's dtype on the CPU was bfloat16, is float16",
    ),
    (
        lambda: torch.autocast("cpu", torch.bfloat16, enabled=False, cache_enabled=False),
        "autocast's cache was on, is off",
    ),
    (lambda: torch.autograd.set_detect_anomaly(True), "anomaly mode was off, is on"),
    (FunctionMode, "the number of torch function modes was 0, is 1"),
    (DispatchMode, "the number of torch dispatch modes was 0, is 1"),
    (lambda: torch.device("cpu"), "the number of torch function modes was 0, is 1"),
    (
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
        "attention was on",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("context, text", CONTEXTS, ids=[text for _, text in CONTEXTS])
def test_contexts_are_seen(context, text):
    state = _C.GlobalState()
    assert state.fits() and state.difference() is None
    with context():
        assert not state.fits()
        assert text in state.difference()
    assert state.fits() and state.difference() is None


def attribute(owner, name):
    def put(value):
        # torch.testing, once imported, wants flags set in a context only.
        with getattr(torch.backends, "__allow_nonbracketed_mutation")():
            setattr(owner, name, value)

    return (lambda: getattr(owner, name)), put


SWITCHES = [
    (
        (
            lambda: torch.is_autocast_enabled("cuda"),
            lambda on: torch.set_autocast_enabled("cuda", on),
        ),
        True,
        "autocast on CUDA was off, is on",
    ),
    (
        (
            lambda: torch.get_autocast_dtype("cuda"),
            lambda dtype: torch.set_autocast_dtype("cuda", dtype),
        ),
        torch.bfloat16,
        "autocast's dtype on CUDA was float16, is bfloat16",
    ),
    (attribute(torch.backends.cudnn, "enabled"), False, "cudnn.enabled was on, is off"),
    (attribute(torch.backends.cudnn, "benchmark"), True, "cudnn.benchmark was off, is on"),
    (attribute(torch.backends.cudnn, "deterministic"), True, "cudnn.deterministic was off, is on"),
    (attribute(torch.backends.cudnn, "allow_tf32"), False, "float32 precision of cuDNN conv was"),
    (
        attribute(torch.backends.cuda.matmul, "allow_tf32"),
        True,
        "float32 precision of CUDA matmul was",
    ),
    (
        attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
        False,
        "float16 reduction in cuBLAS was 0, is 1",
    ),
    (
        attribute(torch.backends.cuda.matmul, "allow_fp16_accumulation"),
        True,
        "float16 accumulation in cuBLAS was off, is on",
    ),
    (
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "high",
        "float32 precision of CUDA matmul was",
    ),
    (
        (torch.get_default_dtype, torch.set_default_dtype),
        torch.float64,
        "the default dtype was float32, is float64",
    ),
    (
        (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
        True,
        "use_deterministic_algorithms was off, is on",
    ),
    (
        attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
        False,
        "deterministic.fill_uninitialized_memory was on, is off",
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("switch, value, text", SWITCHES, ids=[text for *_, text in SWITCHES])
def test_switches_are_seen(switch, value, text):
    get, put = switch
    was = get()
    put(was)  # torch may note who set it last
    state = _C.GlobalState()
    try:
        put(value)
        assert not state.fits()
        assert state.difference().startswith(text)
    finally:
        put(was)
    assert state.fits() and state.difference() is None


def test_mixed_float32_switches_are_read_without_an_error():
    """Where old and new switches disagree, torch's own getters raise."""
    matmul = torch.backends.cuda.matmul
    was = matmul.fp32_precision
    state = _C.GlobalState()
    try:
        matmul.fp32_precision = "tf32"
        assert not state.fits()
        assert state.difference().endswith("is tf32")
    finally:
        matmul.fp32_precision = was
    assert state.fits()
