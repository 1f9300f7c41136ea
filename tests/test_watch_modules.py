# SPDX-License-Identifier: BSD-3-Clause
# Changes of a module that a replay must notice, with what is said of each, and those that it need
# not; arguments that a watch refuses.

import copy

import pytest
import torch
from torch import nn
from watching import Net, assert_changed, assert_unchanged, each_device, watch_of

from torch_renaissance._ops import _C

# -- modules ---------------------------------------------------------------------------------------


def replace_data(dtype):
    def change(net):
        net.fc.weight.data = net.fc.weight.data.clone().to(dtype)

    return change


def reorder(net):
    net._modules["fc"] = net._modules.pop("fc")


def swap(net):
    torch.utils.swap_tensors(net.mask, torch.ones(2, 3, device=net.mask.device))


CHANGES = [
    (lambda n: setattr(n.drop, "p", 0.1), "net.drop: 'p' was 0.5, is 0.1"),
    (lambda n: n.drop.eval(), "net.drop: 'training' was True, is False"),
    (lambda n: setattr(n, "scale", "2.0"), "net: 'scale' was 2.0, is '2.0'"),
    (lambda n: setattr(n, "scale", [2]), "net: 'scale' was 2.0, is a list"),
    (lambda n: setattr(n, "scale", torch.ones(())), "net: 'scale' was 2.0, is a tensor"),
    (lambda n: setattr(n, "scale", "x" * 99), f"net: 'scale' was 2.0, is '{'x' * 59}..."),
    (lambda n: setattr(n, "pair", (1, (3.0, "x"))), "net: 'pair' was (1, (2.0, 'x')), "),
    (lambda n: setattr(n, "new", 1), "net: new attribute 'new'"),
    (lambda n: delattr(n, "scale"), "net: 'scale' is gone"),
    (lambda n: n.register_buffer("b", None), "net._buffers: new attribute 'b'"),
    (lambda n: n.sizes.append(3), "net: 'sizes' has 4 entries, had 3"),
    (lambda n: n.sizes.clear(), "net: 'sizes' has 0 entries, had 3"),
    (lambda n: n.sizes.__setitem__(1, 3.0), "net: 'sizes'[1] was 2.0, is 3.0"),
    (lambda n: setattr(n, "sizes", [1, 2.0, "x"]), "net: 'sizes' is another list"),
    (lambda n: n.rates.update(a=0.25), "net: 'rates'['a'] was 0.5, is 0.25"),
    (lambda n: n.rates.update(c=2), "net: 'rates' has a new entry 'c'"),
    (lambda n: n.rates.pop("b"), "net: 'rates'['b'] is gone"),
    (lambda n: n.rates.update(a=n.rates.pop("a")), "net: 'rates' has its entries in another"),
    (lambda n: n.blocks.pop(), "net: 'blocks' has 1 entry, had 2"),
    (lambda n: n.seen.add(3), "net: 'seen' has 3 entries, had 2"),
    (lambda n: setattr(n, "fc", nn.Linear(3, 4)), "net._modules: 'fc' is another Linear"),
    (lambda n: setattr(n, "act", nn.GELU()), "net._modules: 'act' was a ReLU, is a GELU"),
    (lambda n: setattr(n, "act", None), "net._modules: 'act' was a ReLU, is None"),
    (lambda n: setattr(n, "act", nn.Embedding(2, 2)), "'act' was a ReLU, is an Embedding"),
    (reorder, "net._modules: its entries in another order"),
    (
        lambda n: setattr(n.fc, "weight", nn.Parameter(n.fc.weight.detach().clone())),
        "net.fc._parameters: 'weight' is another tensor",
    ),
    (lambda n: setattr(n.fc, "bias", None), "'bias' was a tensor, is None"),
    (replace_data(torch.float32), "net.fc._parameters: 'weight' has moved"),
    (
        replace_data(torch.float64),
        "'weight' was float32[4, 3] on DEVICE, is float64[4, 3] on DEVICE",
    ),
    (lambda n: n.double(), "net._buffers: 'mask' is another tensor"),
    (lambda n: n.fc.requires_grad_(False), "'weight'.requires_grad was True, is False"),
    (lambda n: n.mask.requires_grad_(), "net._buffers: 'mask'.requires_grad was False, is True"),
    (
        lambda n: setattr(n.bn, "running_mean", torch.zeros(4)),
        "net.bn._buffers: 'running_mean' is another tensor",
    ),
    (lambda n: setattr(n, "extra", torch.zeros(5)), "net: 'extra' is another tensor"),
    (
        lambda n: n.mask.t_(),
        "'mask' was float32[2, 3] on DEVICE, is float32[3, 2] with strides [1, 3] on DEVICE",
    ),
    (lambda n: n.mask.resize_(100, 3), "'mask' was float32[2, 3] on DEVICE, is float32[100, 3] on"),
    (lambda n: n.mask.set_(torch.ones(2, 3).to(n.mask)), "net._buffers: 'mask' has moved"),
    (swap, "net._buffers: 'mask' is another tensor"),
    (
        lambda n: n.fc.register_forward_hook(print),
        "net.fc: '_forward_hooks' has 1 entry, had 0",
    ),
    (
        lambda n: n.register_forward_pre_hook(print),
        "net: '_forward_pre_hooks' has 1 entry, had 0",
    ),
    (
        lambda n: n.fc.register_full_backward_pre_hook(print),
        "net.fc: '_backward_pre_hooks' has 1 entry, had 0",
    ),
    (
        lambda n: n.fc.register_full_backward_hook(print),
        "net.fc: '_is_full_backward_hook' was None, is True",
    ),
]


@each_device
@pytest.mark.parametrize("change, text", CHANGES, ids=[text for _, text in CHANGES])
def test_a_change_of_a_module_is_seen(device, change, text):
    net = Net().to(device)
    watch = watch_of(net)
    assert_unchanged(watch)
    change(net)
    assert text.replace("DEVICE", str(net.mask.device)) in watch.difference()
    assert_changed(watch, watch.difference())


@pytest.mark.cuda
def test_what_a_step_changes_is_no_change():
    device = "cuda"  # on the CPU num_batches_tracked is a number that goes into kernels by value
    net = Net().to(device).train()
    watch = watch_of(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        net.bn(net.fc(torch.ones(2, 3, device=device))).square().sum().backward()
        optimizer.step()  # contents, .grad and buffers (num_batches_tracked) change in place
        net.train()
        assert_unchanged(watch)
    net.load_state_dict(copy.deepcopy(net.state_dict()))
    net.drop.p = float("0.5")
    net.blocks[0] = object()  # of other objects than plain values, the number counts
    assert_unchanged(watch)


@pytest.mark.cuda
def test_a_model_that_moves_to_the_cpu():
    net = Net().cuda()
    watch = watch_of(net)
    net.cpu()
    assert_changed(watch, "net._buffers: 'mask' is another tensor")  # buffers are replaced


def test_each_of_many_stores_is_seen():
    """Python's specialised instructions, which it takes after some rounds, report stores too."""
    drops = [nn.Dropout(0.5) for _ in range(3)]
    for drop in drops:
        watch = watch_of(drop)
        for i in range(300):
            assert_unchanged(watch)
            drop.p = i / 1000
            assert not watch.check()
            drop.p = 0.5
        del drop.p
        assert_changed(watch, "net: 'p' is gone")


def test_several_watches_of_one_module():
    net = Net()
    first, second = watch_of(net), watch_of(net)
    net.scale = 3.0
    third = watch_of(net)
    first.release()
    assert_changed(second, "net: 'scale' was 2.0, is 3.0")
    assert_unchanged(third)
    net.scale = 2.0
    assert_unchanged(second)
    assert_changed(third, "net: 'scale' was 3.0, is 2.0")


def test_a_change_that_is_undone():
    net = Net()
    watch = watch_of(net)
    handle = net.fc.register_forward_hook(print)
    net.fc.weight.requires_grad_(False)
    assert not watch.check()
    handle.remove()
    net.fc.weight.requires_grad_(True)
    assert_unchanged(watch)


# -- refusals --------------------------------------------------------------------------------------


def test_wrong_arguments():
    watch = _C.Watch()
    with pytest.raises(TypeError):
        watch.add_dict(vars(nn.Linear), "a class's attributes are no dict")
    with pytest.raises(TypeError, match="ignore must be a set of keys, got the string 'abc'"):
        watch.add_dict({}, "d", ignore="abc")
    with pytest.raises(TypeError, match="loss's x must be a cell of a function's closure, got 3"):
        watch.add_cell(3, "loss's x")
    with pytest.raises(TypeError, match="w must be a tensor, got a list"):
        watch.add_object_tensor([], "w")
    with pytest.raises(TypeError):
        watch.add_item({}, 3, "globals")
    assert len(watch) == 0
    assert_unchanged(watch)
    with pytest.raises(TypeError):
        _C.Signature([torch.zeros(1)])
