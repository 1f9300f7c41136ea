# SPDX-License-Identifier: BSD-3-Clause
# In a capture, what follows batch norm in place joins its kernel: with the bits of separate
# kernels, and only where nobody can tell.

import pytest
import torch
import torch.nn.functional as F
from batch_norms import (
    FOLLOWS,
    HALVES,
    make_inputs,
    norm_add,
    norm_add_relu,
    norm_alone,
    replay,
    run,
)
from testing import DEVICES
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_renaissance as tr
from torch_renaissance import _precision

pytestmark = pytest.mark.parametrize("device", DEVICES[1:])
each_half = pytest.mark.parametrize("dtype", HALVES.values(), ids=HALVES)
SHAPES = [(3, 12, 5, 7), (32, 256, 14, 14), (128, 512, 1, 1), (32, 64, 112, 112), (200, 96)]


def torchs(nodes):
    """How many kernels of torch's own a graph has."""
    return sum(n for name, n in nodes.items() if "torch_renaissance" not in name)


@each_half
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("function", FOLLOWS)
def test_bits_of_separate_kernels(function, shape, dtype, device):
    inputs, grad = make_inputs(shape, dtype)
    found, nodes = replay(function, inputs, grad)
    assert all(map(torch.equal, found, run(function, inputs, grad)))
    assert torchs(nodes) == torchs(replay(norm_alone, inputs, grad)[1])


def with_hook(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    y.register_hook(lambda grad: grad * 2)
    y += residual
    return F.relu_(y)


def with_reader(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    doubled = y * 2
    return F.relu_(y.add_(residual)) + doubled


def with_view(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    view = y.view(-1) if y.dim() == 2 else y.permute(0, 2, 3, 1).flatten()
    F.relu_(y)
    return y + view.sum() / 1024


def with_node(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    node = y.grad_fn
    y += residual
    assert y.grad_fn is not node
    return F.relu_(y)


def with_factor(x, weight, bias, residual, stats):
    return F.relu_(norm_alone(x, weight, bias, residual, stats).add_(residual, alpha=2))


def with_number(x, weight, bias, residual, stats):
    return F.relu_(norm_alone(x, weight, bias, residual, stats).add_(1))


def with_float32(x, weight, bias, residual, stats):
    return F.relu_(norm_alone(x, weight, bias, residual, stats).add_(residual.float()))


def with_one_channel(x, weight, bias, residual, stats):
    return F.relu_(norm_alone(x, weight, bias, residual, stats).add_(residual[:, :1]))


def with_itself(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    return F.relu_(y.add_(y))


def with_two(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    return F.relu_(y.add_(residual).add_(residual))


def with_another_norm(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    other = norm_alone(residual, weight, bias, None, stats)
    return F.relu_(y.add_(other))


def relu_then_more(x, weight, bias, residual, stats):
    y = F.relu_(norm_alone(x, weight, bias, residual, stats))
    return F.relu(y - 1) + residual


OTHERS = [
    with_hook,
    with_reader,
    with_view,
    with_node,
    with_factor,
    with_number,
    with_float32,
    with_one_channel,
    with_itself,
    with_two,
    with_another_norm,
    relu_then_more,
]


@pytest.mark.parametrize("function", OTHERS)
@pytest.mark.parametrize("shape", [(8, 64, 6, 6), (32, 64, 112, 112)], ids=str)
def test_where_somebody_could_tell(function, shape, device):
    inputs, grad = make_inputs(shape, torch.float16)
    found, _ = replay(function, inputs, grad)
    expected = run(function, inputs, grad)
    assert all(map(torch.equal, found, expected))
    natively = run(function, inputs, grad, own=False)
    for ours, native in zip(found, natively, strict=True):
        assert (ours.float() - native.float()).norm() <= 0.01 * native.float().norm()


def test_a_residual_without_gradient(device):
    inputs, grad = make_inputs((8, 64, 6, 6), torch.float16)
    expected = run(norm_add_relu, inputs, grad)
    inputs[3].requires_grad_(False)
    inputs[3] = inputs[3].detach()
    stats = [torch.zeros(64, device=device), torch.ones(64, device=device)]

    def work():
        with _precision.own_kernels(), torch.autocast("cuda", torch.float16):
            y = norm_add_relu(*inputs, stats)
        return [y.detach(), *torch.autograd.grad(y, inputs[:3], grad)]

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    graph.replay()
    wanted = [expected[0], *expected[3:6]]
    assert all(map(torch.equal, found, wanted))


def test_a_result_that_is_changed_afterwards(device):
    inputs, grad = make_inputs((8, 64, 6, 6), torch.float16)

    def function(*args):
        y = norm_add_relu(*args)
        with torch.no_grad():
            y.mul_(2)
        return y

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        replay(lambda *args: function(*args), inputs, grad)


# -- Two gradients of one tensor -------------------------------------------------------------------


def blocks(x, weight, bias, residual, stats):
    """Three, each with the sum before as its residual."""
    for _ in range(3):
        residual = norm_add_relu(x * residual, weight, bias, residual, stats)
    return residual


def blocks_with_branch(x, weight, bias, residual, stats):
    y = norm_add_relu(x, weight, bias, residual, stats)
    z = norm_add_relu(x * y, weight, bias, y, stats)
    return norm_add_relu(z * y, weight, bias, y, stats)  # y is a residual twice


def blocks_alone(x, weight, bias, residual, stats):
    y = norm_add_relu(x, weight, bias, residual, stats)
    return norm_add_relu(x, weight, bias, y, stats)  # y has no gradient but a residual's


@pytest.mark.parametrize("function", [blocks, blocks_with_branch, blocks_alone])
@pytest.mark.parametrize("shape", [(8, 64, 6, 6), (32, 64, 112, 112)], ids=str)
def test_gradients_of_residuals(function, shape, device):
    inputs, grad = make_inputs(shape, torch.float16)
    found, _ = replay(function, inputs, grad)
    expected = run(function, inputs, grad)
    if function is blocks_with_branch:  # three gradients are added in another order
        for ours, eager in zip(found, expected, strict=True):
            assert (ours.float() - eager.float()).norm() <= 2e-3 * eager.float().norm()
    else:
        assert all(map(torch.equal, found, expected))


def with_own_results(x, weight, bias, residual, stats):
    """ReLUs that leave their input, which backward's kernels take over all the same."""
    for _ in range(2):
        y = F.relu(norm_alone(x * residual, weight, bias, residual, stats))
        residual = F.relu(norm_add(y, weight, bias, residual, stats))
    return residual


def with_a_used_input(x, weight, bias, residual, stats):
    y = norm_alone(x, weight, bias, residual, stats)
    return F.relu(y) + y * residual


def with_an_input_that_changes(x, weight, bias, residual, stats):
    y = norm_add(x, weight, bias, residual, stats)
    z = F.relu(y)
    return y.mul_(2) + z


SEPARATE = [with_own_results, with_a_used_input, with_an_input_that_changes]


@pytest.mark.parametrize("function", SEPARATE)
@pytest.mark.parametrize("shape", [(8, 64, 6, 6), (32, 64, 112, 112)], ids=str)
def test_relu_with_a_result_of_its_own(function, shape, device):
    inputs, grad = make_inputs(shape, torch.float16)
    found, nodes = replay(function, inputs, grad)
    assert all(map(torch.equal, found, run(function, inputs, grad)))
    if function is with_own_results:
        assert not [name for name in nodes if "threshold" in name]


def checkpointed(*args):
    return checkpoint(blocks, *args, use_reentrant=False, preserve_rng_state=False)


def with_saved_tensors_hooks(*args):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
        return blocks(*args)


@pytest.mark.parametrize("function", [checkpointed, with_saved_tensors_hooks])
def test_hooks_on_saved_tensors(function, device):
    inputs, grad = make_inputs((8, 64, 6, 6), torch.float16)
    expected = run(blocks, inputs, grad)
    found, _ = replay(function, inputs, grad)
    assert torch.equal(found[0], expected[0])  # running statistics move twice in a checkpoint
    assert all(map(torch.equal, found[3:], expected[3:]))


@pytest.mark.parametrize("twice", [False, True])
def test_gradients_between_are_whole(twice, device):
    inputs, grad = make_inputs((8, 64, 6, 6), torch.float16)
    stats = [torch.zeros(64, device=device), torch.ones(64, device=device)]

    def work():
        with _precision.own_kernels(), torch.autocast("cuda", torch.float16):
            y = norm_add_relu(*inputs, stats)
            z = norm_add_relu(inputs[0] * y, *inputs[1:3], y, stats)
        if twice:  # what the first call of backward has handed over is its own
            torch.autograd.grad(z, inputs, grad, retain_graph=True)
        return torch.autograd.grad(z, [y, *inputs], grad)

    expected = work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = work()
    graph.replay()
    assert all(map(torch.equal, found, expected))


# -- In a step -------------------------------------------------------------------------------------


class Block(nn.Module):
    """As torchvision's ResNets have them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.aside = nn.Identity()
        if stride != 1:
            aside = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.aside = nn.Sequential(aside, nn.BatchNorm2d(outputs))

    def forward(self, x):
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.aside(x)
        return self.relu(out)


def train(device, precision, warmup):
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True)
    blocks = Block(16, 16, 1), Block(16, 32, 2), Block(32, 32, 1)
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))
    model = model.to(device, memory_format=torch.channels_last)
    _, optimizer = tr.accelerate(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9))
    step = tr.TrainStep(
        lambda x, y: F.cross_entropy(model(x), y),
        optimizer,
        precision=precision,
        warmup=warmup,
        strict=True,
    )
    x = torch.randn(6, 16, 3, 12, 12, device=device)
    y = torch.randint(5, (6, 16), device=device)
    losses = [step(x[i % 6], y[i % 6]).item() for i in range(20)]
    values = [t.clone() for t in (*model.parameters(), *model.buffers())]
    return losses, values, step


@pytest.mark.parametrize("precision", HALVES)
def test_replays_are_eager_steps(precision, device):
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True):
        losses, values, step = train(device, precision, warmup=3)
        eager_losses, eager_values, _ = train(device, precision, warmup=50)
    assert step.captured and losses == eager_losses
    assert all(map(torch.equal, values, eager_values))
    # What is left of ReLU and of sums: none.
    kernels = step.explain().kernels
    assert not [name for name in kernels if "clamp" in name or "threshold" in name]
