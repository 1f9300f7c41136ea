# SPDX-License-Identifier: BSD-3-Clause
# Batch norm's autograd on a CPU: each function below forwards and backwards with what follows batch
# norm joined, as in a capture, separately, as in an eager step, and by torch's batch norm. Prints
# the differences as JSON, in a process of its own, since its rules stay with torch's dispatcher.
import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils import cpp_extension
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
OTHER = {f"{key}CUDA": f"{key}CPU" for key in ("Autocast", "Autograd", "DispatchKey::")}
OTHER["is_cuda()"] = "is_cpu()"
OTHER["TORCH_LIBRARY_FRAGMENT(torch_renaissance, m)"] = "TORCH_LIBRARY_FRAGMENT(emulated_norms, m)"


def load():
    """Builds the sources with a CPU's dispatch keys where anything has changed."""
    build = ROOT / "build" / f"emulated-{sys.implementation.cache_tag}-torch-{torch.__version__}"
    sources = [f for f in (ROOT / "csrc").rglob("*") if f.suffix in (".h", ".cpp")]
    for source in [*sources, HERE / "norms.cpp"]:
        below = source.relative_to(ROOT) if source.parent != HERE else "csrc/cuda/emulated.cpp"
        copy, text = build / below, source.read_text()
        for ours, other in OTHER.items():
            text = text.replace(ours, other)
        if not copy.exists() or copy.read_text() != text:
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(text)
    (build / "made").mkdir(exist_ok=True)
    cpp_extension.load(
        "emulated_norms",
        [str(build / "csrc/cuda/emulated.cpp")],
        extra_include_paths=[str(HERE), str(build / "csrc")],
        extra_cflags=["-O0", "-w", "-DTR_WITH_CUDA"],
        build_directory=str(build / "made"),
        is_python_module=False,
    )
    return torch.ops.emulated_norms


# -- functions -------------------------------------------------------------------------------------


def norm(x, w, b):
    return F.batch_norm(x, None, None, w, b, training=True)


def block(x, residual, w, b):
    y = norm(x, w, b)
    y += residual
    return F.relu_(y)


def plain_block(x, residual, w, b):
    y = norm(x, w, b)
    y += residual
    return F.relu(y)


def norm_relu(x, w, b):
    return F.relu_(norm(x[0], w, b))


def norm_add_relu(x, w, b):
    return block(x[0], x[1], w, b)


def sum_of_norms(x, w, b):
    y, z = norm(x[0], w, b), norm(x[1], w, b)
    y += z
    return F.relu_(y)


def blocks(x, w, b, kind=block):
    y = x[1]
    for _ in range(3):
        y = kind(x[0] * y, y, w, b)
    return y


def plain_blocks(x, w, b):
    return blocks(x, w, b, lambda x, y, w, b: plain_block(F.relu(norm(x, w, b)), y, w, b))


def checkpointed(x, w, b):
    return checkpoint(blocks, x, w, b, use_reentrant=False)


def plain_checkpointed(x, w, b):
    return checkpoint(plain_blocks, x, w, b, use_reentrant=False)


def checkpointed_reentrant(x, w, b):
    return checkpoint(lambda *a: blocks(a[:-2], *a[-2:]), *x, w, b, use_reentrant=True)


def checkpointed_each(x, w, b):
    return blocks(x, w, b, lambda *a: checkpoint(block, *a, use_reentrant=False))


def saved_elsewhere(x, w, b):
    with torch.autograd.graph.save_on_cpu():
        return blocks(x, w, b)


def relu_alone(x, w, b):
    return F.relu(norm(x[0], w, b))


def relu_of_sum_of_norms(x, w, b):
    y, z = norm(x[0], w, b), norm(x[1], w, b)
    y += z
    return F.relu(y)


def relus_input_is_used(x, w, b):
    y = norm(x[0], w, b)
    return F.relu(y) + y * x[1]


def relus_input_is_used_further(x, w, b):
    y = norm(x[0], w, b)
    y += x[1]
    z = F.relu(y)
    return plain_block(z * x[2], z, w, b) + y


def relu_twice(x, w, b):
    y = norm(x[0], w, b)
    return F.relu(y) * x[1] + F.relu(y) * x[2]


def relus_input_changes(x, w, b):
    y = norm(x[0], w, b)
    z = F.relu(y)
    return z + y.mul_(2)


def relu_between(x, w, b):
    y, z = norm(x[0], w, b), F.relu_(norm(x[1], w, b))
    y += z
    return F.relu_(y)


def residual_is_the_input(x, w, b):
    y = norm(x[0], w, b)
    y += x[0]
    return F.relu_(y)


def a_view(x, w, b):
    y = norm(x[0], w, b)
    view = y.permute(0, 2, 3, 1)
    F.relu_(y)
    return y * 2 + view.permute(0, 3, 1, 2)


def a_detached_output(x, w, b):
    y = norm(x[0], w, b)
    detached = y.detach()
    y += x[1]
    F.relu_(y)
    return y + detached


def three(grad):
    return grad * 3


def a_hook_between(x, w, b):
    y = norm(x[0], w, b)
    y.register_hook(three)
    y += x[1]
    return F.relu_(y)


def a_hook_on_relus_input(x, w, b):
    y = norm(x[0], w, b)
    z = F.relu(y)
    y.register_hook(three)
    return z * 1


def a_hook_on_relus_result(x, w, b):
    z = F.relu(norm(x[0], w, b))
    z.register_hook(three)
    return z * x[1]


def a_hook_after_relus_node(x, w, b):
    z = F.relu(norm(x[0], w, b))
    z.grad_fn.register_hook(lambda found, grads: (found[0] * 3,))
    return z * x[1]


def a_hook_on_a_residual(x, w, b):
    y = block(x[0], x[1], w, b)
    y.register_hook(three)
    return block(x[2] * y, y, w, b)


def a_hook_on_a_residuals_node(x, w, b):
    y = block(x[0], x[1], w, b)
    z = block(x[2] * y, y, w, b)
    y.grad_fn.register_prehook(lambda grads: tuple(g * 3 for g in grads))
    return z


def a_hook_after_a_node(x, w, b):
    y = block(x[0], x[1], w, b)
    z = block(x[2] * y, y, w, b)
    z.grad_fn.register_hook(lambda found, _: tuple(None if g is None else g * 2 for g in found))
    return z


def a_retained_gradient(x, w, b):
    y = block(x[0], x[1], w, b)
    y.retain_grad()
    a_retained_gradient.of = y
    return block(x[2] * y, y, w, b)


def many_uses(x, w, b):
    y = block(x[0], x[1], w, b)
    z = block(x[2] * y, y, w, b)
    return block(x[0] * block(x[1] * z, y, w, b), z, w, b) + y


def a_backward_within(x, w, b):
    """Over the same nodes, when the residual's gradient has been handed over and not been used."""
    y = block(x[0], x[1], w, b)
    product = x[2] * y
    z = block(product, y, w, b)
    seen = []

    def within(grad):
        if not seen:
            seen.append(grad)
            torch.autograd.grad(z, x[1], torch.ones_like(z), retain_graph=True)

    product.register_hook(within)
    return z


CHECKPOINTS = [checkpointed, plain_checkpointed, checkpointed_reentrant, checkpointed_each]
FUNCTIONS = [norm_relu, norm_add_relu, sum_of_norms, blocks, plain_blocks, *CHECKPOINTS]
FUNCTIONS += [saved_elsewhere, relu_alone, relu_of_sum_of_norms, relus_input_is_used]
FUNCTIONS += [relus_input_is_used_further, relu_twice, relus_input_changes, relu_between]
FUNCTIONS += [residual_is_the_input, a_view, a_detached_output, a_hook_between]
FUNCTIONS += [a_hook_on_relus_input, a_hook_on_relus_result, a_hook_after_relus_node]
FUNCTIONS += [a_hook_on_a_residual, a_hook_on_a_residuals_node, a_hook_after_a_node]
FUNCTIONS += [a_retained_gradient, a_backward_within, many_uses]


# -- ways to ask for gradients ---------------------------------------------------------------------


def backward(y, leaves, grad):
    y.backward(grad)
    return [t.grad for t in leaves]


def of_all(y, leaves, grad):
    return torch.autograd.grad(y, leaves, grad, allow_unused=True)


def of_some(y, leaves, grad):
    y.backward(grad, inputs=[leaves[0], leaves[-2]])
    return [t.grad for t in leaves]


def twice(y, leaves, grad):
    y.backward(grad, retain_graph=True)
    return backward(y, leaves, grad)


def with_anomalies_detected(y, leaves, grad):
    with torch.autograd.set_detect_anomaly(True):
        return backward(y, leaves, grad)


def batched(y, leaves, grad):
    grads = torch.stack([grad, 2 * grad])
    return torch.autograd.grad(y, leaves, grads, allow_unused=True, is_grads_batched=True)


def second(y, leaves, grad):
    first = torch.autograd.grad(y, leaves, grad, allow_unused=True, create_graph=True)
    squares = sum(g.float().square().sum() for g in first if g is not None)
    return torch.autograd.grad(squares, leaves, allow_unused=True)


WAYS = [backward, of_all, of_some, twice, with_anomalies_detected, batched, second]


def takes(function, way):
    """Whether torch allows it."""
    if function is a_retained_gradient and way is batched:
        return False  # what is retained is of the batch's own kind, which nothing can look at
    if function is checkpointed_reentrant:
        return way in (backward, with_anomalies_detected)
    return function not in CHECKPOINTS or way not in (twice, batched, second)


def run(ops, function, way, joined):
    """Output and gradients, or the error; and the counts of what was joined."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(4, 8, 3, 3, generator=generator).half() for _ in range(4)]
    x = [t.contiguous(memory_format=torch.channels_last) for t in x]
    grad = x.pop()
    leaves = [*x, torch.rand(8, generator=generator) + 0.5, torch.randn(8, generator=generator)]
    for t in leaves:
        t.requires_grad_()
    ops.capturing(joined)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x, *leaves[-2:])
        found = [y.detach(), *way(y, leaves, grad)]
        if function is a_retained_gradient:
            found.append(function.of.grad)
    except Exception as error:
        found = str(error).splitlines()[0]
    ops.capturing(False)
    return found, ops.counts()


def difference(found, expected):
    """0 to the bit; the largest of all tensors', relative to the expected one's norm."""
    if isinstance(found, str) or isinstance(expected, str):
        return 0.0 if found == expected else f"{found} instead of {expected}"
    apart = [0.0]
    for a, b in zip(found, expected, strict=True):
        if (a is None) != (b is None):
            return f"{a} instead of {b}"
        if a is not None and not torch.equal(a, b):
            apart.append(float((a.float() - b.float()).norm() / b.float().norm()))
    return max(apart)


def main():
    ops = load()
    ops.count_autocast_steps(1)
    results = {}
    for function in FUNCTIONS:
        for way in (way for way in WAYS if takes(function, way)):
            expected, _ = run(ops, function, way, joined=False)
            found, counts = run(ops, function, way, joined=True)
            ops.count_autocast_steps(-1)
            torchs, _ = run(ops, function, way, joined=False)
            ops.count_autocast_steps(1)
            name = f"{function.__name__}, {way.__name__}"
            results[name] = [difference(found, expected), counts, difference(found, torchs)]
    print(json.dumps(results))


if __name__ == "__main__":
    main()
