# SPDX-License-Identifier: BSD-3-Clause
# When a watch takes Python values and tensors for the same: numbers, containers, keys, globals,
# cells, and tensors of every kind.

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from watching import NAN, Mine, assert_changed, assert_unchanged, dict_watch

from torch_renaissance._ops import _C

# -- values ----------------------------------------------------------------------------------------

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
