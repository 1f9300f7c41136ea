# SPDX-License-Identifier: BSD-3-Clause
# tr.TrainStep with precision= trains as torch.autocast does: 16-bit copies of weights, modules that
# want float32, autocast around a step, and refusals. On a GPU the later steps are replays.

import copy
import re

import pytest
import torch
from autocasting import (
    CASES,
    DTYPES,
    IMAGE,
    ROWS,
    SCALE,
    SEQUENCE,
    VECTOR,
    Trainings,
    Transformer,
    batches,
    each_precision,
    each_row,
    eager_on_a_cpu,
    has_grad_dtype,
    squares,
    wide,
)
from testing import DEVICES, LM, equal, values_of
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import torch_renaissance as tr

pytestmark = [pytest.mark.parametrize("device", DEVICES), eager_on_a_cpu]


# -- beside torch.autocast -------------------------------------------------------------------------


@each_row
@each_precision
@pytest.mark.parametrize("case", CASES)
def test_trains_as_torchs_autocast(case, precision, row, device):
    t = Trainings(case, row, precision, device)
    t.run_all(8)
    t.check()
    assert t.step.explain().autocast == {}


@each_precision
def test_flat_gradients(precision, device):
    t = Trainings("conv_bn", ROWS[0], precision, device, gradients="flat")
    t.run_all(8)
    t.check()


def copies(optimizer):
    """The 16-bit copies in plane H, by parameter."""
    return {
        s.param: s.block.slice(tr.Plane.H, s.index)
        for s in tr.regions(optimizer).slots
        if s.block is not None and tr.Plane.H in s.block.planes
    }


@each_precision
def test_weights_are_used_in_16_bits_and_kept_so_by_the_update(precision, device):
    """Of Linear and attention, as autocast would cast them at every step; norms, embeddings and
    parametrized weights keep autocast's way."""
    seen = {}

    def loss(model, x):
        for name, p in model.named_parameters():
            seen[name] = p.dtype
        return squares(model, x)

    def make():
        model = Transformer()
        model.down = weight_norm(model.down)
        return model

    t = Trainings((make, SEQUENCE, loss), ROWS[1], precision, device)
    for batch in batches(SEQUENCE, 6):
        t.run_ours(batch.to(device))
        t.check_untouched()
        low = {name for name, dtype in seen.items() if dtype == DTYPES[precision]}
        assert low == {
            *("attention.in_proj_weight", "attention.in_proj_bias", "attention.out_proj.weight"),
            *("attention.out_proj.bias", "up.weight", "up.bias", "down.bias"),
        }
        assert {d for n, d in seen.items() if n not in low} == {torch.float32}
        in_h = copies(t.optimizer)
        for name, p in t.ours.named_parameters():
            if name in low:
                assert torch.equal(in_h[p], p.detach().to(DTYPES[precision])), name


@each_precision
def test_tied_weights_keep_autocasts_way_unless_all_their_users_take_16_bits(precision, device):
    """An embedding's gradient is float32, a Linear's 16-bit; two Linears agree."""

    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.lm, self.a, self.b = LM(), nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, tokens):
            x = torch.tanh(self.b(torch.tanh(self.a(self.lm.emb(tokens)))))
            return self.lm(tokens) + squares(self.lm.head, x)

    class Seen:  # TrainStep watches dicts of the closure, but no slots
        __slots__ = ("dtypes",)

    seen = Seen()
    seen.dtypes = {}

    def loss(model, tokens):
        seen.dtypes[id(model)] = {name: p.dtype for name, p in model.named_parameters()}
        assert model.a.weight is model.b.weight and model.lm.head.weight is model.lm.emb.weight
        return model(tokens)

    t = Trainings((Shared, None, loss), ROWS[0], precision, device)
    t.run_all(8)
    t.check()
    dtypes = seen.dtypes[id(t.ours)]
    assert dtypes["a.weight"] == dtypes["lm.mid.weight"] == DTYPES[precision]
    assert dtypes["lm.emb.weight"] == torch.float32


@has_grad_dtype
@each_precision
def test_gradients_stay_in_16_bits(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    seen = []
    for p in t.ours.parameters():
        p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.dtype))
    with warnings_of_hooks(device):
        t.run_all(2)
    assert seen == [DTYPES[precision]] * 8


def warnings_of_hooks(device):
    """On a GPU hooks make the step eager, which it says once."""
    return pytest.warns(UserWarning, match="hook" if device == "cuda" else "CPU")


# -- modules that want float32 ---------------------------------------------------------------------


class Dropout(nn.Module):
    """With the same mask in every dtype, unlike torch's on a GPU."""

    def forward(self, x):
        return x * (torch.rand(x.shape, device=x.device) < 0.5)


class HeadInFloat32(nn.Module):
    """The head is called where autocast is off, behind layers that leave traces of a call."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), Dropout())
        self.head = nn.Linear(16, 2)

    def forward(self, x):
        x = self.body(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(wide(x))


@each_row
@each_precision
def test_a_module_called_where_autocast_is_off_keeps_float32(precision, row, device, capsys):
    case = HeadInFloat32, VECTOR, squares
    t = Trainings(case, row, precision, device)
    t.run_all(8)
    t.check()
    assert int(t.ours.body[1].num_batches_tracked) == 8
    found = t.step.explain().autocast
    assert list(found) == ["model.head"] and "type" in found["model.head"]
    assert "weights left to autocast: model.head (" in capsys.readouterr().out


@each_precision
def test_a_convolution_called_where_autocast_is_off_keeps_float32(precision, device):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)

        def forward(self, x):
            x = torch.tanh(self.a(x))
            with torch.autocast(x.device.type, enabled=False):
                return self.b(wide(x))

    t = Trainings((Model, IMAGE, squares), ROWS[0], precision, device)
    t.run_all(8)
    t.check()
    assert list(t.step.explain().autocast) == ["model.b"]


@each_precision
def test_attention_called_where_autocast_is_off_keeps_float32(precision, device):
    """Its forward reads the weights of `out_proj`, without calling it."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(16, 16)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            x = self.up(x)
            with torch.autocast(x.device.type, enabled=False):
                x = wide(x)
                return self.attention(x, x, x, need_weights=False)[0]

    t = Trainings((Model, SEQUENCE, squares), ROWS[0], precision, device)
    t.run_all(8)
    t.check()
    assert "model.attention" in t.step.explain().autocast
    assert "model.up" not in t.step.explain().autocast


@each_row
@each_precision
def test_backward_of_what_runs_in_float32_runs_in_float32(precision, row, device):
    """A training wholly in a region without autocast is one in float32."""

    class Product(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(6, 5))

        def forward(self, x):
            with torch.autocast(x.device.type, enabled=False):
                return torch.tanh(x @ self.matrix) @ self.matrix.t()

    t = Trainings((Product, VECTOR, squares), row, precision, device)
    for batch in batches(VECTOR, 5):
        t.run_exact(batch.to(device))
        t.run_ours(batch.to(device))
    exact = t.values("exact")
    # Five steps of sums over up to 30 products, each rounded to fp32; 16 bits would give 1e-3.
    assert (t.values("ours") - exact).norm() <= 1e-5 * exact.norm()


# -- autocast around a step, and refusals ----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_without_precision_the_programs_autocast_counts(dtype, device):
    """Also over several steps: weights that autocast has cast for one are not those of the next."""
    precision = {v: k for k, v in DTYPES.items()}[dtype]
    t = Trainings("mlp", ROWS[0], precision, device)
    t.scaler = t.optimizer.amp = None
    t.step = tr.TrainStep(lambda x: t.loss(t.ours, x), t.optimizer)
    for batch in batches(VECTOR, 8):
        t.run_exact(batch.to(device))
        t.run_native(batch.to(device))
    with torch.autocast(device, dtype):
        for batch in batches(VECTOR, 8):
            t.run_ours(batch.to(device))
    t.check()


@each_precision
def test_precision_inside_of_autocast_is_refused(precision, device):
    t = Trainings("mlp", ROWS[1], precision, device)
    given = batches(VECTOR, 10)
    words = (
        f"precision='{precision}' does its own autocast; call the step outside of torch.autocast"
    )
    for i, batch in enumerate(given):
        if i in (0, 5):
            before = t.everything()
            scale = t.optimizer.amp and t.optimizer.amp.state_dict()
            with torch.autocast(device, torch.bfloat16), pytest.raises(RuntimeError, match=words):
                t.step(batch.to(device))
            assert equal(t.everything(), before)
            assert scale == (t.optimizer.amp and t.optimizer.amp.state_dict())
            t.check_untouched()
        t.run(batch)
    t.check()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"precision": "fp8"}, ValueError, "must be one of ['fp16', 'bf16'] or None, got 'fp8'"),
        ({"precision": "FP16"}, ValueError, "got 'FP16'"),
        ({"precision": torch.float16}, ValueError, "got torch.float16"),
        ({"precision": True}, ValueError, "got True"),
        ({"scaler": 1024.0}, TypeError, "scaler must be a torch.amp.GradScaler, got float"),
        ({"scaler": "mine"}, TypeError, "scaler must be a torch.amp.GradScaler, got str"),
    ],
    ids=str,
)
def test_other_precisions_and_scalers_are_refused(options, error, words, device):
    p = nn.Parameter(torch.ones(3, device=device))
    optimizer = tr.optim.AdamW([p])
    before = dict(vars(optimizer))
    with pytest.raises(error, match=re.escape(words)):
        tr.TrainStep(lambda: p.sum(), optimizer, **options)
    assert vars(optimizer) == before


@each_precision
def test_precision_together_with_a_scaler_is_refused(precision, device):
    p = nn.Parameter(torch.ones(3, device=device))
    optimizer = tr.optim.AdamW([p])
    before, scaler = dict(vars(optimizer)), torch.amp.GradScaler(device)
    with pytest.raises(ValueError, match="loss scale of its own; pass either precision or scaler"):
        tr.TrainStep(lambda: p.sum(), optimizer, precision=precision, scaler=scaler)
    assert vars(optimizer) == before and scaler._scale is None


@each_precision
def test_a_parameter_left_to_torch_with_a_loss_scale_is_refused_by_name(precision, device):
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    tr.accelerate(model, optimizer)
    step = tr.TrainStep(lambda i: squares(model, i), optimizer, precision=precision)
    tokens, before = torch.tensor([1, 1, 4], device=device), values_of(model.parameters())
    if precision == "bf16":  # needs none
        step(tokens)
        assert not equal(model.parameters(), before)
        return
    scale = optimizer.amp.state_dict()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"a loss scale can't be had with 0\.weight.*sparse"):
            step(tokens)
        assert equal(model.parameters(), before) and optimizer.amp.state_dict() == scale
        assert all(p.grad is None for p in model.parameters())


@each_precision
def test_two_runs_are_bitwise_equal(precision, device):
    runs = []
    for _ in range(2):
        t = Trainings("mlp", ROWS[1], precision, device, ema_decay=0.9, max_norm=0.05)
        for batch in batches(VECTOR, 7):
            t.run_ours(batch.to(device))
        runs.append([*t.everything(), *t.losses["ours"]])
    assert equal(*runs)


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")  # between the two parameters
@each_precision
def test_a_replaced_parameter_has_a_copy_of_its_own(precision, device):
    torch.manual_seed(0)
    native = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device)
    ours = copy.deepcopy(native)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (native, ours)]
    tr.accelerate(ours, optimizers[1])
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16", **SCALE)
    optimizers[1].amp = tr.amp.LossScale(device, **SCALE)
    step = tr.TrainStep(lambda x: ours(x).float().pow(2).mean(), optimizers[1], precision=precision)
    for i in range(12):
        if i == 6:
            weight = torch.randn(8, 4, device=device)
            for model, optimizer in zip((native, ours), optimizers, strict=True):
                model[0].weight = nn.Parameter(weight.clone())
                optimizer.param_groups[0]["params"][0] = model[0].weight
        x = torch.randn(5, 4, device=device)
        optimizers[0].zero_grad()
        with torch.autocast(device, dtype=DTYPES[precision]):
            loss = native(x).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        torch.testing.assert_close(step(x), loss.detach(), rtol=2e-2, atol=1e-4)
    assert step.captured == (device == "cuda")
    for p, q in zip(native.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=2e-2, atol=1e-3)
    assert not torch.equal(ours[0].weight, weight)
