# SPDX-License-Identifier: BSD-3-Clause
# A watch of any dict after any changes, what it puts back, and what it keeps alive.

import collections
import copy
import gc
import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from watching import NAN, Net, assert_changed, assert_unchanged, dict_watch, watch_of

from torch_renaissance._ops import _C

few = settings(max_examples=200, deadline=None)


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
