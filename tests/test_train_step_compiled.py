# SPDX-License-Identifier: BSD-3-Clause
# TrainStep(compile=True, precision=...) on a GPU: it learns what the uncompiled step learns, with
# kernels of ours where it says so, captured and the same bits again.

import copy

import pytest
import torch
import torch.nn.functional as F
from test_compiled_inductor import Transformer, residual_net
from torch import nn

import torch_renaissance as tr

pytestmark = pytest.mark.cuda
STEPS = 12


class Encoder(nn.Module):
    """Long enough for the gradient of the head's first bias to be ours: 2,048 rows."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            64, 4, 128, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.stem = nn.Conv2d(3, 64, 4, 4)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(64)
        self.head = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2).float()
        return self.head(self.norm(self.layers(x))).mean(1)


MODELS = {
    "convolutions": (residual_net, (32, 3, 16, 16), ["batch_norm", "max_pool"]),
    "norm last": (Transformer, (32, 3, 8, 8), ["gelu_kernel", "pack_heads"]),
    "encoder": (
        Encoder,
        (32, 3, 32, 32),
        ["layer_norm_kernel", "layer_norm_backward", "gelu_backward", "pack_heads", "column_sums"],
    ),
}


def train(model, shape, precision, compile):
    """Losses, the trained model, and the kernels of its step."""
    torch.backends.cudnn.benchmark = False
    model = copy.deepcopy(model).cuda()
    if any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    model, optimizer = tr.accelerate(model, optimizer)
    step = tr.TrainStep(
        lambda x, y: F.cross_entropy(model(x), y),
        optimizer,
        precision=precision,
        compile=compile,
        strict=True,
    )
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(shape, generator=generator, device="cuda")
    y = torch.randint(0, 4, (shape[0],), generator=generator, device="cuda")
    losses = [float(step(x, y)) for _ in range(STEPS)]
    assert step.captured
    return losses, model, step.explain().kernels


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_it_learns_the_same(name, precision, capsys):
    torch._dynamo.reset()
    torch.manual_seed(0)
    make, shape, kernels = MODELS[name]
    model = make()
    losses, plain, _ = train(model, shape, precision, compile=False)
    found, compiled, called = train(model, shape, precision, compile=True)
    missing = [k for k in kernels if not any(k in kernel for kernel in called)]
    assert not missing, sorted(called)
    assert losses[-1] < losses[0]
    torch.testing.assert_close(found, losses, rtol=0.05, atol=0.02)
    for (key, ours), theirs in zip(compiled.named_buffers(), plain.buffers(), strict=True):
        if "tracked" in key:
            assert ours == theirs == STEPS
        else:
            torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.02)
    again, *_ = train(model, shape, precision, compile=True)
    assert again == found


def test_other_batches_too():
    """Another batch size is compiled for any, and captured by itself."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Encoder().cuda()
    model, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), lr=0.0))
    step = tr.TrainStep(
        lambda x: model(x).float().square().mean(), optimizer, precision="bf16", compile=True
    )
    for batch in (32, 24, 16, 24, 32) * 3:
        x = torch.randn(batch, 3, 32, 32, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            expected = model(x).float().square().mean()
        torch.testing.assert_close(step(x), expected, rtol=0.05, atol=1e-3)
    assert step.captured
