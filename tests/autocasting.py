# SPDX-License-Identifier: BSD-3-Clause
# What the tests of precision= and scaler= share: models, and `Trainings`, the same training in
# float64, in torch's autocast and by a TrainStep.

import copy

import pytest
import torch
import torch.nn.functional as F
from testing import LM, USUAL, Optimizer, conv_bn, values_of
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

import torch_renaissance as tr

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The usual eps would turn a gradient that is zero but for rounding, such as that of an attention's
# key bias, into a step of full size.
ADAMW = {"lr": 0.02, "weight_decay": 0.5, "eps": 1e-3}
ROWS = [USUAL[0], Optimizer(torch.optim.AdamW, tr.optim.AdamW, ADAMW)]
SCALE = {"init_scale": 1024.0, "growth_interval": 3}
# What a CPU says at the first call. On a GPU the tests ask whether the step was captured.
eager_on_a_cpu = pytest.mark.filterwarnings(
    "ignore:TrainStep runs eagerly. the parameters are on the CPU"
)
each_precision = pytest.mark.parametrize("precision", DTYPES)
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
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
