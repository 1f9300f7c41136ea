# SPDX-License-Identifier: BSD-3-Clause
# What a replay must check first: that Python objects are as they were, that the arguments and the
# global switches are those of the capture, and what is said where they aren't.
import collections
import copy
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testing import DEVICES
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_renaissance._ops import _C

few = settings(max_examples=200, deadline=None)
each_device = pytest.mark.parametrize("device", DEVICES)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 4)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.5)
        self.bn = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.ones(2, 3))
        self.sizes = [1, 2.0, "x"]
        self.rates = {"a": 0.5, "b": 1}
        self.blocks = [object(), object()]
        self.seen = {1, 2}
        self.scale = 2.0
        self.pair = (1, (2.0, "x"))
        self.extra = torch.zeros(5, device="cpu")


def watch_of(module, name="net"):
    """All that a module's forward may read of it and its submodules."""
    watch = _C.Watch()
    for path, m in module.named_modules(prefix=name):
        watch.add_dict(m.__dict__, path)
        for part in ("_parameters", "_buffers", "_modules"):
            watch.add_dict(getattr(m, part), f"{path}.{part}")
    return watch


def dict_watch(d, name="d", **options):
    watch = _C.Watch()
    watch.add_dict(d, name, **options)
    return watch


def assert_unchanged(watch):
    assert watch.check()
    assert watch.difference() is None


def assert_changed(watch, text):
    assert watch.difference() == text
    assert not watch.check()
    assert not watch.check(), "seeing a change once is no reason to forget it"


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


# -- values ----------------------------------------------------------------------------------------

NAN = float("nan")
nothing = object()


@pytest.mark.parametrize(
    "was, now, same",
    [
        (1, 1.0, False),
        (True, 1, False),
        (1, True, False),
        (None, False, False),
        (10**30, 10**15 * 10**15, True),
        (10**30, 10**30 + 1, False),
        (0.1, float("0.1"), True),
        (NAN, -NAN, True),
        (NAN, 1.0, False),
        (0.0, -0.0, False),
        (complex(1, NAN), complex(1, NAN), True),
        (complex(1, 0.0), complex(1, -0.0), False),
        ("ab", "".join("ab"), True),
        ("ab", b"ab", False),
        ((1, (2.0, "x"), NAN), (1, (float("2"), "x"), NAN), True),
        ((1, 2), (1, 2.0), False),
        ((1, 2), (1, 2, 3), False),
        ((1, nothing), (1, nothing), False),
        (torch.Size([1]), torch.Size([1]), False),
        (torch.float32, torch.float, True),
        (torch.float32, torch.float64, False),
        (torch.device("cuda", 1), torch.device("cuda:1"), True),
        (torch.device("cuda", 1), torch.device("cuda:0"), False),
        (print, print, True),
        ([1], [1], False),
        (nothing, object(), False),
    ],
)
def test_sameness_of_values(was, now, same):
    d = {"v": was, "w": 0}
    watch = dict_watch(d)
    d["v"] = now
    assert watch.check() == same
    assert (watch.difference() is None) == same
    d["v"] = was
    assert_unchanged(watch)


class Loud:
    """Whoever asks it anything hears of it."""

    asked: list[str] = []  # noqa: RUF012

    def __eq__(self, other):
        self.asked.append("__eq__")
        raise RuntimeError

    def __hash__(self):
        return 1

    def __len__(self):
        self.asked.append("__len__")
        raise RuntimeError

    def __repr__(self):
        self.asked.append("__repr__")
        raise RuntimeError

    @property
    def __class__(self):
        self.asked.append("__class__")
        raise RuntimeError


def test_odd_objects_are_not_asked():
    d = {Loud(): Loud(), 2: Loud(), "list": [Loud()], "tuple": (Loud(),)}
    Loud.asked.clear()
    watch = dict_watch(d)
    assert_unchanged(watch)
    d[2] = Loud()
    assert_changed(watch, "d: 2 is another Loud")
    watch.restore()
    assert_unchanged(watch)
    key = next(iter(d))
    d.pop(key)
    assert_changed(watch, "d: a Loud is gone")
    watch.restore()
    assert_unchanged(watch)
    assert Loud.asked == []


def test_what_python_refuses_to_write_out():
    d = {"n": 10**5000}
    watch = dict_watch(d)
    d["n"] += 1
    assert watch.difference().startswith("d: 'n' was ")
    assert not watch.check()


def test_contents_of_lists_and_dicts():
    numbers, long, mixed = list(range(64)), list(range(65)), [1, nothing]
    named, dict_of_mixed = {"a": 1, 2: 0.5}, {"a": nothing}
    watch = dict_watch(dict(a=numbers, b=long, c=mixed, d=named, e=dict_of_mixed))
    long[0], mixed[0], dict_of_mixed["a"] = 7, 7, 7  # their length is all that counts
    numbers[1] = int("1")
    assert_unchanged(watch)
    numbers[1] = 1.0
    assert_changed(watch, "d: 'a'[1] was 1, is 1.0")
    numbers[1] = 1
    named[2] = 0.25
    assert_changed(watch, "d: 'd'[2] was 0.5, is 0.25")
    named[2] = 0.5
    dict_of_mixed["b"] = 1
    assert_changed(watch, "d: 'e' has 2 entries, had 1")
    dict_of_mixed.pop("b")
    long.pop()
    assert_changed(watch, "d: 'b' has 64 entries, had 65")


def test_keys_and_their_order():
    d = {"a": 1, 2: 2}
    watch = dict_watch(d)
    assert len(watch) == 2
    d.pop("a")
    d["".join("a")] = 1
    assert_changed(watch, "d: its entries in another order")
    d[2] = d.pop(2)
    assert_unchanged(watch)  # an equal key will do
    d.pop(2)
    d[2.0] = 2
    assert_changed(watch, "d: 2 is gone")


def test_ignored_keys():
    d = {"count": 0, "a": 1, "lr": 0.1, "b": 2}
    watch = dict_watch(d, ignore={"count", "lr", "later"})
    assert len(watch) == 2
    d.update(count=1, later=torch.zeros(1))
    d.pop("lr")
    assert_unchanged(watch)
    d["other"] = 1
    assert_changed(watch, "d: new attribute 'other'")
    watch.restore()
    assert d == {"count": 1, "a": 1, "b": 2, "later": d["later"]}
    assert_unchanged(watch)
    d.pop("a")
    assert_changed(watch, "d: 'a' is gone")


def test_items():
    names = {"alpha": 0.5, "model": nn.Linear(1, 1), "xs": [1]}
    watch = _C.Watch()
    for key in ("alpha", "model", "xs", "beta"):
        watch.add_item(names, key, "globals")
    assert len(watch) == 4
    names.update(gamma=1, alpha=float("0.5"))
    assert_unchanged(watch)
    names["alpha"] = 0.25
    assert_changed(watch, "globals: 'alpha' was 0.5, is 0.25")
    names["alpha"] = 0.5
    names["model"] = nn.Linear(1, 1)
    assert_changed(watch, "globals: 'model' is another Linear")
    names.pop("model")
    assert_changed(watch, "globals: 'model' is gone")
    watch = _C.Watch()
    watch.add_item(names, "beta", "globals")
    assert_unchanged(watch)
    names["beta"] = None
    assert_changed(watch, "globals: 'beta' is new")


def test_a_changed_global_number():
    space = {"scale": 1.0}
    exec("def loss(x): return x * scale\ndef rescale(s):\n    global scale; scale = s", space)
    watch = _C.Watch()
    watch.add_item(space["loss"].__globals__, "scale", "loss")
    space["rescale"](1.0)
    assert_unchanged(watch)
    space["rescale"](2.0)
    assert_changed(watch, "loss: 'scale' was 1.0, is 2.0")


def closure():
    scale, model, unset = 1.0, nn.Linear(1, 1), None

    def loss():
        return scale, model, unset  # noqa: F821

    def rebind(name, value):
        nonlocal scale, model, unset
        if name == "scale":
            scale = value
        elif name == "model":
            model = value
        else:
            unset = value

    del unset
    return loss, rebind


@pytest.mark.parametrize(
    "name, value, text",
    [
        ("scale", 0.5, "loss's scale was 1.0, is 0.5"),
        ("model", nn.Linear(1, 1), "loss's model is another Linear"),
        ("model", None, "loss's model was a Linear, is None"),
        ("unset", 1, "loss's unset is new"),
    ],
)
def test_cells(name, value, text):
    loss, rebind = closure()
    watch = _C.Watch()
    cells = dict(zip(loss.__code__.co_freevars, loss.__closure__, strict=True))
    for variable, cell in cells.items():
        watch.add_cell(cell, f"loss's {variable}")
    assert len(watch) == 3
    rebind("scale", float("1"))
    assert_unchanged(watch)
    rebind(name, value)
    assert_changed(watch, text)


def test_a_cell_that_is_emptied():
    cell = closure()[0].__closure__[1]
    watch = _C.Watch()
    watch.add_cell(cell, "scale")
    del cell.cell_contents
    assert_changed(watch, "scale is gone")


# -- tensors ---------------------------------------------------------------------------------------


def test_one_tensor():
    t = torch.zeros(2, 3)
    watch = _C.Watch()
    watch.add_object_tensor(t, "x")
    assert len(watch) == 1
    t.add_(1)
    assert_unchanged(watch)
    t.requires_grad_()
    assert_changed(watch, "x.requires_grad was False, is True")
    t.requires_grad_(False)
    assert_unchanged(watch)
    t.data = torch.zeros(2, 3)
    assert_changed(watch, "x has moved")


def test_a_view_that_is_shifted():
    memory = torch.zeros(10)
    t = memory[:4]
    watch = _C.Watch()
    watch.add_object_tensor(t, "x")
    t.data = memory[1:5]
    assert_changed(watch, "x has moved")
    t.data = memory[:4]
    assert_unchanged(watch)


def test_a_cpu_scalar_goes_into_kernels_by_value():
    step = torch.tensor(1.0)
    watch = dict_watch({"step": step})
    assert_unchanged(watch)
    step += 1
    assert_changed(watch, "d: 'step' has another value")
    watch = dict_watch({"step": step})
    step.data = torch.tensor(2.0)
    assert_changed(watch, "d: 'step' has moved")


class Mine(torch.Tensor):
    pass


def fake():
    with FakeTensorMode():
        return torch.zeros(2)


def made_for_inference():
    with torch.inference_mode():
        return torch.zeros(2)


def nested(**options):
    return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], **options)


STRIDED = {
    "meta": lambda: torch.zeros(2, device="meta"),
    "inference": made_for_inference,
    "conj": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "neg": lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
    "empty": lambda: torch.zeros(0, 3),
    "scalar": lambda: torch.zeros(()),
    "uninitialized": lambda: nn.LazyLinear(2).weight,
    "subclass": lambda: torch.zeros(2).as_subclass(Mine),
    "parameter": lambda: nn.Parameter(torch.zeros(2)),
}
ODD = {
    "sparse": lambda: torch.eye(2).to_sparse(),
    "csr": lambda: torch.eye(2).to_sparse_csr(),
    "nested": nested,
    "jagged": lambda: nested(layout=torch.jagged),
    "fake": fake,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*STRIDED, *ODD])
def test_special_tensors(kind):
    make = {**STRIDED, **ODD}[kind]
    d = {"t": make()}
    watch, signature = dict_watch(d), _C.Signature((d["t"],))
    assert_unchanged(watch)
    assert signature.fits((d["t"],)) == (kind in STRIDED)
    assert ("without strides" in str(signature)) == (kind in ODD)
    d["t"] = make()
    assert_changed(watch, "d: 't' is another tensor")
    assert signature.fits((d["t"],)) == (kind in STRIDED)
    d["t"] = torch.ones(3, 3)
    assert_changed(watch, "d: 't' is another tensor")
    assert not signature.fits((d["t"],))


def test_a_sparse_tensor_that_becomes_another():
    t = torch.eye(2).to_sparse()
    watch = dict_watch({"t": t})
    t.requires_grad_()
    assert_changed(watch, "d: 't'.requires_grad was False, is True")


# -- any dict --------------------------------------------------------------------------------------

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from([0.0, -0.0, 0.5, NAN, math.inf]),
    st.sampled_from(["", "a"]),
    st.tuples(st.integers(0, 1), st.booleans()),
)
containers = st.one_of(
    st.lists(plain, max_size=3),
    st.dictionaries(st.integers(0, 2), plain, max_size=3),
    st.sets(st.integers(0, 3)),
    st.builds(lambda n: [object() for _ in range(n)], st.integers(0, 2)),
    st.builds(lambda n: list(range(n)), st.integers(63, 66)),
)
tensors = st.builds(lambda n: torch.zeros(n), st.integers(0, 2))
values = st.one_of(plain, containers, tensors, st.builds(object))
keys = st.sampled_from("abcdef")


def facts(value, depth=0):
    """The rule in slow words: what of a value must be equal later."""
    if isinstance(value, torch.Tensor):
        form = (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
        return (id(value), value.data_ptr(), form)
    if type(value) is tuple and all(isinstance(v, int) for v in value):
        return tuple((type(v), v) for v in value)
    if value is None or type(value) in (bool, int, float, str):
        return (type(value), repr(value))
    if isinstance(value, dict | list | set):
        inner = list(value.items()) if isinstance(value, dict) else list(value)
        objects = [v for pair in inner for v in pair] if isinstance(value, dict) else inner
        known = len(inner) <= 64 and not isinstance(value, set)
        known = known and all(type(v) is not object for v in objects)
        return (id(value), len(value), [facts(v) for v in objects] if known else None)
    return id(value)


def mutate(d, draw):
    """One random change of a dict or of something in it, which may be none."""
    key = draw(keys)
    kind = draw(st.sampled_from(["set", "same", "pop", "move", "inside"]))
    if kind == "set":
        d[key] = draw(values)
    elif key not in d:
        pass
    elif kind == "same":
        d[key] = copy.copy(d[key]) if type(d[key]) is float else d[key]
    elif kind == "pop":
        d.pop(key)
    elif kind == "move":
        d[key] = d.pop(key)
    elif isinstance(d[key], torch.Tensor):
        draw(
            st.sampled_from(
                [
                    lambda t: t.requires_grad_(not t.requires_grad),
                    lambda t: setattr(t, "data", t.data.clone()),
                    lambda t: t.data.add_(1),
                    lambda t: t.data.resize_(3),
                ]
            )
        )(d[key])
    elif isinstance(d[key], list):
        at = draw(st.integers(0, len(d[key])))
        d[key][at : at + draw(st.integers(0, 1))] = draw(st.lists(plain, max_size=1))
    elif isinstance(d[key], dict):
        d[key][draw(st.integers(0, 2))] = draw(plain)
    elif isinstance(d[key], set):
        d[key] ^= {draw(st.integers(0, 3))}


class Plain:
    """Attributes of an object, which Python may keep outside a dict."""


@few
@given(data=st.data())
def test_any_changes(data):
    holder = Plain()
    holder.__dict__.update(data.draw(st.dictionaries(keys, values)))
    d = holder.__dict__
    ignored = data.draw(st.sets(keys, max_size=1))
    watch = dict_watch(d, ignore=ignored)
    kept = list(d.values())  # so that no id is used again

    def now():
        return [(k, facts(v)) for k, v in d.items() if k not in ignored]

    was = now()
    assert_unchanged(watch)
    for _ in range(data.draw(st.integers(1, 4))):
        mutate(d, data.draw)
        kept += d.values()
        assert watch.check() == (now() == was)
        assert watch.check() == (watch.difference() is None)
    others = {k: (id(v), facts(v)) for k, v in d.items() if k in ignored}
    watch.restore()
    assert {k: (id(v), facts(v)) for k, v in d.items() if k in ignored} == others
    assert [k for k in d if k not in ignored] == [k for k, _ in was]
    for (key, before), (_, after) in zip(was, now(), strict=True):
        if not isinstance(d[key], torch.Tensor | list | dict | set):
            assert before == after
        elif isinstance(d[key], list | dict) and before[2] is not None:
            assert before == after
    assert watch.check() == (watch.difference() is None)


# -- restore ---------------------------------------------------------------------------------------


def test_restore_a_module():
    net = Net()
    watch = watch_of(net)
    state = {k: v.clone() for k, v in net.state_dict().items()}
    weight, fc = net.fc.weight, net.fc
    net.fc.weight = nn.Parameter(torch.zeros(1))
    net.fc.register_forward_hook(print)
    net.fc = nn.Linear(1, 1)
    net.late = nn.Linear(1, 1)
    net.register_buffer("late_buffer", torch.zeros(1), persistent=False)
    net.eval()
    net.scale, net.new = 3.0, 4.0
    del net.pair
    net.sizes[:] = [5]
    net.rates.update(a=7, c=8)
    with torch.no_grad():
        net.bn.running_mean.add_(1)
    watch.restore()
    assert_unchanged(watch)
    assert net.fc is fc and fc.weight is weight
    assert net.training and net.drop.training and net.scale == 2.0 and net.pair == (1, (2.0, "x"))
    assert not hasattr(net, "new") and not hasattr(net, "late")
    assert net.sizes == [1, 2.0, "x"] and net.rates == {"a": 0.5, "b": 1}
    assert fc._forward_hooks == {} and net._non_persistent_buffers_set == set()
    assert list(net.state_dict()) == list(state)
    state["bn.running_mean"] += 1  # contents are not its affair
    assert all(torch.equal(state[k], v) for k, v in net.state_dict().items())
    net.scale = 5.0
    assert_changed(watch, "net: 'scale' was 2.0, is 5.0")


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
def test_restore_keys_and_their_order(kind):
    d = kind(a=1, b=2, c=[1, 2], e=[])
    inner = d["c"]
    watch = dict_watch(d, ignore={"later"})
    d["x"] = 1
    d["a"] = d.pop("a") + 1
    d["later"] = 5
    del d["c"]
    inner.append(3)
    d["e"].append(3)
    watch.restore()
    assert_unchanged(watch)
    assert list(d.items()) == [("later", 5), ("a", 1), ("b", 2), ("c", [1, 2]), ("e", [])]
    assert d["c"] is inner
    assert len(d) == len(list(d)) == len(list(reversed(d)))


def test_restore_passes_on_what_a_dict_raises():
    class Locked(dict):
        def __setitem__(self, key, value):
            raise RuntimeError("locked")

    d = Locked(a=1)
    watch = dict_watch(d)
    dict.__setitem__(d, "a", 2)
    with pytest.raises(RuntimeError, match="locked"):
        watch.restore()


# -- memory ----------------------------------------------------------------------------------------


def test_release_lets_go():
    net = Net()
    watch = watch_of(net)
    watch.add_item({"net": net}, "net", "globals")
    watch.add_cell((lambda: net).__closure__[0], "cell")
    watch.add_object_tensor(net.mask, "mask")
    alive, mask = weakref.ref(net.fc), weakref.ref(net.mask)
    net.scale = 3.0
    watch.release()
    assert len(watch) == 0
    assert_unchanged(watch)
    del net
    gc.collect()
    assert alive() is None and mask() is None
    net = Net()
    watch.add_dict(net.__dict__, "net")
    net.scale = 3.0
    assert_changed(watch, "net: 'scale' was 2.0, is 3.0")


def test_a_watch_keeps_what_it_knows_by_identity():
    d = {"o": Plain(), "t": torch.zeros(1)}
    kept = [weakref.ref(v) for v in d.values()]
    watch = dict_watch(d)
    d.clear()
    gc.collect()
    assert all(r() is not None for r in kept)
    del watch
    assert all(r() is None for r in kept)


def test_the_garbage_collector_frees_a_model_that_holds_its_watch():
    net = Net()
    net.watch, net.signature = watch_of(net), _C.Signature((net, torch.zeros(1)))
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None


def test_watches_come_and_go_beside_each_other():
    net = Net()
    kept = watch_of(net)
    for i in range(20):
        watch = watch_of(net)
        net.scale = float(i)
        assert watch.check() == (i == 2)
        net.scale = 2.0
        assert watch.check() and kept.check()
        del watch


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
