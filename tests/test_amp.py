# SPDX-License-Identifier: BSD-3-Clause
# tr.TrainStep with precision= or scaler= against a hand-written loop with torch.autocast and
# torch.amp.GradScaler; tr.amp.LossScale. On a GPU the later steps are replays of a graph.

import copy
import io
import math
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from testing import DEVICES, GRADIENTS, LM, USUAL, Optimizer, conv_bn, equal, values_of
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import weight_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import torch_renaissance as tr

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The usual eps would turn a gradient that is zero but for rounding, such as that of an attention's
# key bias, into a step of full size.
ADAMW = {"lr": 0.02, "weight_decay": 0.5, "eps": 1e-3}
ROWS = [USUAL[0], Optimizer(torch.optim.AdamW, tr.optim.AdamW, ADAMW)]
BAD = (0, 2, 6, 10)  # of the twelve steps of some tests
SCALE = {"init_scale": 1024.0, "growth_interval": 3}
pytestmark = [
    pytest.mark.parametrize("device", DEVICES),
    # What a CPU says at the first call. On a GPU the tests ask whether the step was captured.
    pytest.mark.filterwarnings("ignore:TrainStep runs eagerly. the parameters are on the CPU"),
]
each_precision = pytest.mark.parametrize("precision", DTYPES)
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
each_gradients = pytest.mark.parametrize("gradients", GRADIENTS)
has_grad_dtype = pytest.mark.skipif(
    not hasattr(torch.Tensor, "grad_dtype"), reason="torch before 2.10 has no grad_dtype"
)


# -- models ----------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """A block with nn.MultiheadAttention, whose in_proj_weight belongs to no Linear."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.LayerNorm(16)])
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Checkpointed(nn.Module):
    """Runs its layers once more in backward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        def layers(x):
            return self.second(torch.tanh(self.first(x)))

        return checkpoint(layers, x, use_reentrant=False, preserve_rng_state=False)


class Standardized(nn.Conv2d):
    """Weight standardization (https://arxiv.org/abs/1903.10520): a Conv2d that computes with its
    weight, in float32 under autocast."""

    def forward(self, x):
        w = self.weight
        w = (w - w.mean((1, 2, 3), keepdim=True)) / (w.std((1, 2, 3), keepdim=True) + 1e-5)
        return self._conv_forward(x, w, self.bias)


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


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))


def standardized():
    model = nn.Sequential(Standardized(3, 8, 3), nn.ReLU(), Standardized(8, 4, 3))
    with torch.no_grad():  # far from zero, where rounding first and subtracting then costs most
        model[0].weight.add_(3.0)
        model[2].weight.add_(3.0)
    return model


def wide(x):
    """Out of 16 bits; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()


def squares(model, x):
    return wide(model(x)).pow(2).mean()


VECTOR, IMAGE, SEQUENCE = (8, 6), (4, 3, 9, 9), (3, 5, 16)
CASES = {
    "mlp": (mlp, VECTOR, squares),
    "conv_bn": (conv_bn, IMAGE, squares),
    "channels_last": (lambda: conv_bn().to(memory_format=torch.channels_last), IMAGE, squares),
    "transformer": (Transformer, SEQUENCE, squares),
    "tied": (LM, None, lambda model, tokens: model(tokens)),
    "weight_norm": (
        lambda: nn.Sequential(weight_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 4)),
        VECTOR,
        squares,
    ),
    "checkpoint": (Checkpointed, VECTOR, squares),
    "weight standardization": (standardized, IMAGE, squares),
}


def batches(shape, n):
    generator = torch.Generator().manual_seed(1)
    if shape is None:
        return [torch.randint(7, (9,), generator=generator) for _ in range(n)]
    return [torch.randn(shape, generator=generator) for _ in range(n)]


# -- three trainings side by side ------------------------------------------------------------------


class Trainings:
    """The same training in float64, in torch's autocast, and ours."""

    def __init__(
        self,
        case,
        row,
        precision,
        device,
        *,
        gradients="gather",
        max_norm=None,
        options=None,
        **more,
    ):
        make, self.shape, self.loss = CASES.get(case, case)
        self.precision, self.device, self.max_norm = precision, device, max_norm
        torch.manual_seed(0)
        self.exact = make().to(device)
        self.native, self.ours = copy.deepcopy(self.exact), copy.deepcopy(self.exact)
        self.exact.double()
        self.optimizers = {}
        for name in ("exact", "native", "ours"):
            model = getattr(self, name)
            self.optimizers[name] = row.native(model.parameters(), **row.options)
        self.optimizer = self.optimizers["ours"]
        tr.accelerate(
            self.ours, self.optimizer, gradients=gradients, max_grad_norm=max_norm, **more
        )
        self.scaler = None
        if precision == "fp16":
            self.scaler = torch.amp.GradScaler(device, **SCALE)
            self.optimizer.amp = tr.amp.LossScale(device, **SCALE)
        self.step = self.make_step()
        self.losses = {"exact": [], "native": [], "ours": []}
        self.places = [
            (module, name, p)
            for module in self.ours.modules()
            for name, p in module._parameters.items()
        ]

    def make_step(self):
        return tr.TrainStep(
            lambda *batch: self.loss(self.ours, *batch), self.optimizer, precision=self.precision
        )

    def run_native(self, *batch):
        optimizer = self.optimizers["native"]
        optimizer.zero_grad()
        with torch.autocast(self.device, DTYPES[self.precision]):
            loss = self.loss(self.native, *batch)
        self.losses["native"].append(loss.detach().double())
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.scaler and self.max_norm is not None:
            self.scaler.unscale_(optimizer)
        if self.max_norm is not None:
            self.norm = clip_grad_norm_(self.native.parameters(), self.max_norm)
        if self.scaler:
            self.scaler.step(optimizer)
            self.scaler.update()
        else:
            optimizer.step()

    def run_exact(self, *batch):
        optimizer = self.optimizers["exact"]
        optimizer.zero_grad()
        loss = self.loss(self.exact, *[t.double() if t.is_floating_point() else t for t in batch])
        self.losses["exact"].append(loss.detach().double())
        loss.backward()
        if self.max_norm is not None:
            clip_grad_norm_(self.exact.parameters(), self.max_norm)
        optimizer.step()

    def run_ours(self, *batch):
        loss = self.step(*batch)
        assert not loss.requires_grad
        self.losses["ours"].append(loss.double())

    def run(self, *batch):
        batch = [t.to(self.device) for t in batch]
        for each in (self.run_exact, self.run_native, self.run_ours):
            torch.manual_seed(5)  # dropout
            each(*batch)
        if self.scaler:
            assert self.optimizer.amp.get_scale() == self.scaler.get_scale()

    def run_all(self, n):
        for batch in batches(self.shape, n):
            self.run(batch)
            self.check_untouched()

    def check_untouched(self):
        """Parameters are as the program knows them, whatever the step had in their places."""
        for module, name, p in self.places:
            assert module._parameters[name] is p
        for p in self.ours.parameters():
            assert p.dtype == torch.float32 and p.is_leaf and p.grad is None
            assert getattr(p, "grad_dtype", p.dtype) == torch.float32
        for value in self.ours.state_dict().values():
            assert value.dtype in (torch.float32, torch.int64)

    def values(self, name):
        tensors = [*getattr(self, name).parameters(), *getattr(self, name).buffers()]
        return torch.cat([t.detach().double().flatten() for t in tensors])

    def check(self, replayed=True):
        """Ours is as far from float64 as torch's autocast, at most twice. On a CPU the very same
        kernels get the same values but for the rounding of the update, so it is much closer."""
        for kind in (self.values, lambda name: torch.stack(self.losses[name])):
            exact, native, ours = (kind(name) for name in ("exact", "native", "ours"))
            error = (native - exact).norm()
            assert 0 < error < 0.2 * exact.norm()
            assert (ours - exact).norm() <= 2 * error
            if self.device == "cpu":
                assert (ours - native).norm() <= 0.1 * error
        for p, q in zip(self.native.buffers(), self.ours.buffers(), strict=True):
            assert p.is_floating_point() or torch.equal(p, q)
        native, ours = (self.optimizers[name].state_dict() for name in ("native", "ours"))
        assert ours["state"].keys() == native["state"].keys()
        if replayed:
            assert self.step.captured == (self.device == "cuda")

    def everything(self):
        """All that a step may change, as copies."""
        state = self.optimizer.state_dict()["state"]
        moments = [v for entries in state.values() for v in entries.values() if v is not None]
        found = values_of([*self.ours.parameters(), *self.ours.buffers(), *moments])
        if self.optimizer.ema_decay is not None:
            found += tr.Ema(self.ours, self.optimizer).state_dict().values()
        return found


def copies(optimizer):
    """The 16-bit copies in plane H, by parameter."""
    return {
        s.param: s.block.slice(tr.Plane.H, s.index)
        for s in tr.regions(optimizer).slots
        if s.block is not None and tr.Plane.H in s.block.planes
    }


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
def test_gradients_reach_the_update_in_16_bits(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    seen = []
    t.optimizer.register_step_pre_hook(
        lambda *_: seen.append({p.grad.dtype for p in t.ours.parameters()})
    )
    with warnings_of_hooks(device):
        t.run_all(2)
    assert seen == [{DTYPES[precision]}] * 2


def warnings_of_hooks(device):
    """On a GPU hooks make the step eager, which it says once."""
    return pytest.warns(UserWarning, match="hook" if device == "cuda" else "CPU")


# -- what happens between and inside of steps ------------------------------------------------------


def load(model):
    model.load_state_dict({name: value + 0.3 for name, value in model.state_dict().items()})


def multiply(model):
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-1.5)


def initialize(model):
    for i, p in enumerate(model.parameters()):
        nn.init.constant_(p, 0.05 * (i + 1))


def replace_data(model):
    for p in model.parameters():
        p.data = p.data.clone() * 2


def through_data(model):
    for p in model.parameters():
        p.data.mul_(2.0)


@each_precision
@pytest.mark.parametrize("change", [load, multiply, initialize, replace_data, through_data])
def test_changes_of_weights_are_seen_by_the_next_step(change, precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    (batch,) = batches(VECTOR, 1)
    for _ in range(5):
        t.run(batch)
    before = t.losses["native"][-1]
    for model in (t.exact, t.native, t.ours):
        change(model)
    if change is through_data:  # which nothing in torch can see
        t.step.refresh()
    for _ in range(6):
        t.run(batch)
        t.check_untouched()
    assert not 0.8 < t.losses["native"][5] / before < 1.25  # a stale weight would show
    t.check()


@each_precision
def test_averages_in_the_model_and_out_of_it_again(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device, ema_decay=0.9)
    (batch,) = batches(VECTOR, 1)
    ema = tr.Ema(t.ours, t.optimizer)
    for _ in range(5):
        t.run(batch)
    before = t.everything()
    with ema.swapped():
        averages = values_of(t.ours.parameters())
        with pytest.raises(RuntimeError, match="hold their averages now"):
            t.step(batch.to(device))
        t.check_untouched()
        assert equal(t.ours.parameters(), averages)
    assert equal(t.everything(), before)
    for _ in range(5):
        t.run(batch)
    t.check()
    assert ema.updates == 10


@each_precision
def test_other_ways_to_step_in_between(precision, device):
    """A hand-written loop and a second TrainStep without precision share the optimizer."""
    t = Trainings("mlp", ROWS[0], precision, device)
    t.scaler = None  # gradients are small enough without

    def plain(model, optimizer, batch):
        optimizer.zero_grad()
        t.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    other = tr.TrainStep(lambda x: t.loss(t.ours, x), t.optimizer)
    for i, batch in enumerate(batches(VECTOR, 18)):
        batch = batch.to(device)
        if i % 3 == 0:
            t.run_exact(batch)
            t.run_native(batch)
            t.run_ours(batch)
        else:
            plain(t.exact, t.optimizers["exact"], batch.double())
            plain(t.native, t.optimizers["native"], batch)
            if i % 3 == 1:
                plain(t.ours, t.optimizer, batch)
            else:
                other(batch)
        t.check_untouched()
    t.check(replayed=False)
    if precision == "fp16":  # which the others have left alone: it grew after each three of six
        assert t.optimizer.amp.get_scale() == 4 * SCALE["init_scale"]


@each_precision
def test_frozen_and_thawed_weights(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    models = (t.exact, t.native, t.ours)
    for model in models:
        model[0].requires_grad_(False)
    for phase in range(3):
        for model in models:
            model[0].requires_grad_(phase == 1)
        frozen = values_of(t.ours[0].parameters())
        for batch in batches(VECTOR, 6):
            t.run(batch)
            t.check_untouched()
        assert equal(t.ours[0].parameters(), frozen) == (phase != 1)
    t.check()


class Boom(Exception):
    """The program's own."""


@each_precision
@pytest.mark.parametrize("where", ["before", "inside", "after"])
def test_an_exception_in_the_loss_function_leaves_no_trace(where, precision, device):
    armed = []

    def boom(*_):
        if armed:
            raise Boom

    class Trap(nn.Module):
        def forward(self, x):
            boom()
            return x

    def make():
        return nn.Sequential(nn.Linear(6, 16), Trap() if where == "inside" else nn.Tanh(), mlp2())

    def mlp2():
        return nn.Sequential(nn.Tanh(), nn.Linear(16, 4))

    def loss(model, x):
        if where == "before":
            boom()
        value = squares(model, x)
        if where == "after":
            boom()
        return value

    t = Trainings((make, VECTOR, loss), ROWS[1], precision, device, ema_decay=0.9)
    given = batches(VECTOR, 8)
    for i, batch in enumerate(given):
        if i in (0, 1):
            before = t.everything()
            armed.append(True)
            with pytest.raises(Boom):
                t.step(batch.to(device))
            armed.clear()
            t.check_untouched()
            assert equal(t.everything(), before)
        t.run(batch)
    t.check()


@each_precision
def test_gradients_from_before_are_added_to(precision, device):
    """As natively, without zero_grad before backward."""
    t = Trainings("mlp", ROWS[0], precision, device)
    first, second = (b.to(device) for b in batches(VECTOR, 2))
    for name in ("exact", "native", "ours"):
        model = getattr(t, name)
        squares(model, first.double() if name == "exact" else first).backward()
        if precision == "fp16" and name != "exact":
            for p in model.parameters():
                p.grad.mul_(SCALE["init_scale"])
    t.optimizers["exact"].zero_grad = t.optimizers["native"].zero_grad = lambda: None
    with pytest.warns(UserWarning, match="gradient already" if device == "cuda" else "CPU"):
        t.run(second)
    t.check_untouched()
    t.check(replayed=False)


@each_precision
def test_an_exception_before_backward_leaves_gradients_from_before(precision, device):
    def loss(model, x):
        raise Boom

    t = Trainings((mlp, VECTOR, loss), ROWS[0], precision, device)
    for p in t.ours.parameters():
        p.grad = torch.ones_like(p)
    held, before = [p.grad for p in t.ours.parameters()], t.everything()
    (batch,) = batches(VECTOR, 1)
    with pytest.raises(Boom):
        t.step(batch.to(device))
    assert equal(t.everything(), before)
    for p, gradient in zip(t.ours.parameters(), held, strict=True):
        assert p.grad is gradient and (gradient == 1).all()


@each_precision
def test_an_exception_in_a_hook_with_gradients_from_before(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    t.ours[0].weight.grad = torch.zeros_like(t.ours[0].weight)
    before = t.everything()

    def boom(*_):
        raise Boom

    handle = t.optimizer.register_step_pre_hook(boom)
    (batch,) = batches(VECTOR, 1)
    with pytest.raises(Boom):
        t.step(batch.to(device))
    handle.remove()
    assert equal(t.everything(), before)
    for module, name, p in t.places:
        assert module._parameters[name] is p
        assert p.grad is None or p.grad.dtype == torch.float32
        assert getattr(p, "grad_dtype", p.dtype) == torch.float32
    t.optimizer.zero_grad()
    for batch in batches(VECTOR, 6):
        t.run(batch)
    t.check()


@has_grad_dtype
@each_precision
def test_the_programs_own_grad_dtype_comes_back(precision, device):
    t = Trainings("mlp", ROWS[0], precision, device)
    t.ours[0].weight.grad_dtype = None
    t.ours[2].weight.grad_dtype = torch.float64
    for batch in batches(VECTOR, 2):
        t.run(batch)
        assert t.ours[0].weight.grad_dtype is None
        assert t.ours[2].weight.grad_dtype == torch.float64
        assert t.ours[0].bias.grad_dtype == torch.float32


# -- modules that want float32 ---------------------------------------------------------------------


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


# -- clipping and the loss scale -------------------------------------------------------------------


@each_row
@each_precision
@each_gradients
def test_clipping_is_of_the_unscaled_gradients(row, precision, gradients, device):
    t = Trainings("mlp", row, precision, device, max_norm=0.05, gradients=gradients)
    for i, batch in enumerate(batches(VECTOR, 12)):
        if i == 6:
            t.max_norm = t.optimizer.max_grad_norm = 0.02
        t.run(batch)
        t.check_untouched()
        torch.testing.assert_close(t.optimizer.grad_norm, t.norm, rtol=2e-2, atol=0)
        assert t.norm > t.max_norm
    t.check()


@each_row
@each_gradients
def test_bad_steps_are_skipped_whole_and_the_scale_moves_as_gradscalers(row, gradients, device):
    t = Trainings("mlp", row, "fp16", device, ema_decay=0.8, max_norm=10.0, gradients=gradients)
    ema, scales = tr.Ema(t.ours, t.optimizer), []
    average = AveragedModel(t.native, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    for i, batch in enumerate(batches(VECTOR, 12)):
        bad = i in BAD
        if bad:
            batch[3, 2] = math.nan if i == 2 else math.inf
        before, updates = t.everything(), ema.updates
        batch = batch.to(device)
        if not bad:
            t.run_exact(batch)
        t.run_native(batch)
        if not bad:
            average.update_parameters(t.native)
        t.run_ours(batch)
        t.check_untouched()
        assert equal(t.everything(), before) == bad
        assert ema.updates == updates + (not bad)
        assert t.optimizer.amp.get_scale() == t.scaler.get_scale()
        scales.append(t.scaler.get_scale())
        tracker = t.scaler.state_dict()["_growth_tracker"]
        assert t.optimizer.amp.state_dict()["_growth_tracker"] == tracker
    assert scales == [512, 512, 256, 256, 256, 512, 256, 256, 256, 512, 256, 256]
    assert int(t.optimizer.skipped_steps) == 4
    for p, mine in zip(average.module.parameters(), ema.state_dict().values(), strict=True):
        assert (mine - p).norm() <= 1e-3 * p.norm()
    for name in ("native", "ours"):  # of the good steps, as in "exact"
        t.losses[name] = [x for i, x in enumerate(t.losses[name]) if i not in BAD]
    t.check()


def test_a_scale_that_overflows_finds_its_way_down(device):
    t = Trainings("mlp", ROWS[0], "fp16", device)
    big = {"init_scale": 2.0**40, "backoff_factor": 2.0**-8, "growth_interval": 2}
    t.scaler, t.optimizer.amp = torch.amp.GradScaler(device, **big), tr.amp.LossScale(device, **big)
    for batch in batches(VECTOR, 14):
        before = t.everything()
        t.run_native(batch.to(device))
        t.run_ours(batch.to(device))
        assert t.optimizer.amp.get_scale() == t.scaler.get_scale()
        skipped = t.scaler.get_scale() < 2.0**40 and equal(t.everything(), before)
    assert not skipped and 3 <= int(t.optimizer.skipped_steps) < 12


def test_growth_stops_before_infinity(device):
    scale = {"init_scale": 2.0**126, "growth_interval": 1, "growth_factor": 4.0}
    p = nn.Parameter(torch.zeros(3, device=device))
    optimizer = tr.optim.SGD([p], lr=0.1)
    optimizer.amp = tr.amp.LossScale(device, **scale)
    step = tr.TrainStep(lambda: (p * 0).sum(), optimizer, precision="fp16")
    for _ in range(6):
        step()
        assert optimizer.amp.get_scale() == 2.0**126
    assert int(optimizer.skipped_steps) == 0


def test_another_loss_scale_counts_at_once(device):
    t = Trainings("mlp", ROWS[0], "fp16", device)
    t.run_all(6)
    for scale in ({"init_scale": 64.0, "growth_interval": 2}, {"init_scale": 8.0}):
        t.optimizer.amp = tr.amp.LossScale(device, **scale)
        t.scaler = torch.amp.GradScaler(device, **scale)
        t.run_all(5)
        t.optimizer.amp.growth_interval = 1
        t.scaler.set_growth_interval(1)
        t.optimizer.amp.growth_factor = 3.0
        t.scaler.set_growth_factor(3.0)
        t.run_all(3)
    t.check()


def test_bf16_has_no_loss_scale_and_fp16_keeps_the_one_that_is_there(device):
    for precision in ("bf16", "fp16"):
        p = nn.Parameter(torch.ones(3, device=device))
        optimizer = tr.optim.SGD([p], lr=0.1)
        tr.TrainStep(lambda p=p: p.sum(), optimizer, precision=precision)
        if precision == "bf16":
            assert optimizer.amp is None
            continue
        assert optimizer.amp.get_scale() == 65536 == torch.amp.GradScaler(device).get_scale()
        kept = optimizer.amp
        tr.TrainStep(lambda p=p: p.sum(), optimizer, precision=precision)
        assert optimizer.amp is kept


def test_state_dict_goes_both_ways_between_loss_scale_and_gradscaler(device):
    t = Trainings("mlp", ROWS[0], "fp16", device)
    t.run_all(5)
    ours, native = t.optimizer.amp.state_dict(), t.scaler.state_dict()
    assert ours == native
    assert {k: type(v) for k, v in ours.items()} == {k: type(v) for k, v in native.items()}
    scaler = torch.amp.GradScaler(device, init_scale=2.0, growth_interval=9)
    scaler.load_state_dict(ours)
    amp = t.optimizer.amp
    scale, tracker = amp.scale, amp.growth_tracker
    other = {"scale": 1.0, "growth_factor": 3.0, "backoff_factor": 0.1, "growth_interval": 5}
    for state in (other | {"_growth_tracker": 4}, native):
        amp.load_state_dict(state)
        assert amp.state_dict() == state
        assert amp.scale is scale and amp.growth_tracker is tracker  # for the sake of graphs
    t.scaler = scaler
    t.run_all(5)
    assert t.optimizer.amp.state_dict() == scaler.state_dict()
    t.check()
    with pytest.raises(RuntimeError, match="state_dict is empty; it was saved by a GradSc"):
        t.optimizer.amp.load_state_dict(torch.amp.GradScaler(device, enabled=False).state_dict())
    assert t.optimizer.amp.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_carry_the_loss_scale(how, device):
    t = Trainings("mlp", ROWS[1], "fp16", device)
    t.run_all(5)
    original = t.optimizer.amp
    if how == "deepcopy":
        copied = copy.deepcopy((t.ours, t.optimizer))
        alone = copy.deepcopy(original)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps((t.ours, t.optimizer)))
        alone = pickle.loads(pickle.dumps(original))
    else:
        file = io.BytesIO()
        torch.save((t.ours, t.optimizer, original), file)
        file.seek(0)
        *copied, alone = torch.load(file, weights_only=False)
    before = original.state_dict()
    t.ours, t.optimizer = copied
    t.optimizers["ours"], t.places = t.optimizer, []
    assert t.optimizer.amp is not original
    assert t.optimizer.amp.state_dict() == alone.state_dict() == before
    t.step = t.make_step()
    t.run_all(6)
    t.check()
    assert original.state_dict() == before != t.optimizer.amp.state_dict()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init_scale": 0.0}, "init_scale must be positive, got 0.0"),
        ({"init_scale": -1.0}, "init_scale must be positive, got -1.0"),
        ({"init_scale": math.nan}, "init_scale must be positive, got nan"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1, got 1.0"),
        ({"growth_factor": math.nan}, "growth_factor must be above 1, got nan"),
        ({"backoff_factor": 1.0}, r"backoff_factor must be in \(0, 1\), got 1.0"),
        ({"backoff_factor": 0.0}, r"backoff_factor must be in \(0, 1\), got 0.0"),
        ({"growth_interval": 0}, "growth_interval must be >= 1, got 0"),
    ],
    ids=str,
)
def test_impossible_loss_scales_are_refused(options, words, device):
    with pytest.raises(ValueError, match="LossScale: " + words):
        tr.amp.LossScale(device, **options)


# -- the program's own scaler ----------------------------------------------------------------------


class Scaled(Trainings):
    """With autocast in the loss function and a GradScaler for each side."""

    def __init__(self, *args, scaler_options=SCALE, **more):
        super().__init__(*args, **more)
        self.scaler, self.mine = (torch.amp.GradScaler(self.device, **scaler_options) for _ in "ab")
        self.step = tr.TrainStep(self.autocast_loss, self.optimizer, scaler=self.mine)

    def autocast_loss(self, *batch):
        with torch.autocast(self.device, torch.float16):
            return self.loss(self.ours, *batch)

    def make_step(self):
        self.optimizer.amp = None


@each_row
@each_gradients
def test_a_gradscaler_behaves_as_in_a_loop(row, gradients, device):
    t = Scaled("mlp", row, "fp16", device, gradients=gradients, max_norm=0.3)
    scales = []
    for i, batch in enumerate(batches(VECTOR, 12)):
        bad = i in BAD
        if bad:
            batch[3, 2] = math.inf
        batch, before = batch.to(device), t.everything()
        if not bad:
            t.run_exact(batch)
        t.run_native(batch)
        t.run_ours(batch)
        t.check_untouched()
        assert equal(t.everything(), before) == bad
        assert t.mine.state_dict() == t.scaler.state_dict()
        scales.append(t.mine.get_scale())
    assert scales == [512, 512, 256, 256, 256, 512, 256, 256, 256, 512, 256, 256]
    assert t.optimizer.amp is None and int(t.optimizer.skipped_steps) == 4
    for name in ("native", "ours"):  # of the good steps, as in "exact"
        t.losses[name] = [x for i, x in enumerate(t.losses[name]) if i not in BAD]
    t.check()
    for scaler, model, optimizer in (  # and goes on in a hand-written loop
        (t.scaler, t.native, t.optimizers["native"]),
        (t.mine, t.ours, t.optimizer),
    ):
        optimizer.zero_grad()
        scaler.scale(squares(model, batch)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert t.mine.state_dict() == t.scaler.state_dict()


def test_a_disabled_gradscaler_does_nothing(device):
    t = Scaled("mlp", ROWS[0], "fp16", device, scaler_options={"enabled": False})
    for batch in batches(VECTOR, 8):
        batch = batch.to(device)
        t.run_exact(batch)
        t.run_native(batch)
        t.run_ours(batch)
    t.check()
    assert t.mine.state_dict() == {} and t.mine.get_scale() == 1.0


@pytest.mark.parametrize("change", ["update", "load_state_dict", "set_growth_interval"])
def test_changes_of_a_gradscaler_count_at_once(change, device):
    t = Scaled("mlp", ROWS[0], "fp16", device)
    for phase in range(2):
        for batch in batches(VECTOR, 6):
            batch = batch.to(device)
            t.run_native(batch)
            t.run_ours(batch)
            assert t.mine.state_dict() == t.scaler.state_dict()
        for scaler in (t.scaler, t.mine):
            if phase == 0 and change == "update":
                scaler.update(16.0)
            elif phase == 0 and change == "load_state_dict":
                scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0, "_growth_tracker": 2})
            else:
                scaler.set_growth_interval(2)


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
