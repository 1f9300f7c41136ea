# SPDX-License-Identifier: BSD-3-Clause
# tr.lr: what is refused, and how schedules are drawn.

import math
import sys

import pytest
import torch

import torch_renaissance as tr

lr = tr.lr

EPOCHS = {"steps_per_epoch": 10, "by": "epoch"}
NO_COUNT = ((0, ValueError, "at least 1, got 0"), (1.5, TypeError, "an int"), (True, TypeError, ""))
NO_NUMBER = (
    (-1.0, ValueError, "a finite number"),
    (math.nan, ValueError, "a finite number"),
    (math.inf, ValueError, "a finite number"),
    (True, TypeError, "a number, got True"),
    ("1", TypeError, "a number, got '1'"),
    (torch.tensor(0.1), TypeError, "a number, got tensor"),
)


def refuse(kind, words, error=ValueError, **settings):
    return pytest.param(kind, {"lr": 1.0, **settings}, error, words)


def refuse_each(values, kind, name, **settings):
    return [
        refuse(kind, f"{name} must be {words}", error, **{**settings, name: value})
        for value, error, words in values
    ]


REFUSED = [
    *refuse_each(NO_NUMBER, lr.Constant, "lr"),
    refuse(lr.Constant, "lr must be a finite number above 0, got 0", lr=0),
    *refuse_each(NO_COUNT[1:], lr.Constant, "warmup"),
    *refuse_each(NO_COUNT[1:], lr.Constant, "warmup_steps"),
    refuse(lr.Constant, "warmup must be at least 0, got -1", warmup=-1),
    refuse(lr.Constant, "warmup_steps must be at least 0, got -2", warmup_steps=-2),
    refuse(lr.Constant, "warmup=1 and warmup_steps=9 both say how long", warmup=1, warmup_steps=9),
    refuse(lr.Constant, "by='epoch' rules out; pass warmup=", warmup_steps=9, **EPOCHS),
    *refuse_each(NO_NUMBER, lr.Constant, "warmup_lr", warmup=3),
    *refuse_each(NO_NUMBER, lr.Constant, "warmup_factor", warmup=3),
    refuse(lr.Constant, "warmup_lr must be at most 1.0, where", warmup=3, warmup_lr=1.5),
    refuse(lr.Constant, "warmup_factor must be at most 1.0", warmup=3, warmup_factor=2, lr=9.0),
    refuse(lr.Constant, "both say where", warmup=3, warmup_lr=0.1, warmup_factor=0.1),
    refuse(lr.Constant, "says where a warm-up starts, but there is none", warmup_lr=0.1),
    refuse(lr.Constant, "says where a warm-up starts, but there is none", warmup_factor=0.0),
    refuse(lr.Constant, "by must be one of ('batch', 'epoch'), got 'step'", by="step"),
    refuse(lr.Constant, "by='epoch' needs to know how long an epoch is; pass steps", by="epoch"),
    *refuse_each(NO_COUNT, lr.Constant, "steps_per_epoch"),
    *refuse_each(NO_COUNT, lr.Step, "step_size"),
    *refuse_each(NO_NUMBER, lr.Step, "gamma", step_size=2),
    *refuse_each(NO_NUMBER, lr.MultiStep, "gamma", milestones=[2]),
    *refuse_each(NO_NUMBER, lr.Exponential, "gamma"),
    refuse(lr.MultiStep, "milestones must increase, got [3, 3]; sort them", milestones=[3, 3]),
    refuse(lr.MultiStep, "milestones must increase, got [5, 3]", milestones=(5, 3)),
    refuse(lr.MultiStep, "milestones[0] must be at least 1, got 0", milestones=[0]),
    refuse(lr.MultiStep, "milestones[1] must be an int", TypeError, milestones=[1, 2.0]),
    refuse(lr.MultiStep, "milestones must be a list of ints, got 3", TypeError, milestones=3),
    refuse(lr.MultiStep, "milestones must be a list of ints", TypeError, milestones="12"),
    *refuse_each(NO_COUNT, lr.Polynomial, "total"),
    *refuse_each(NO_COUNT, lr.Cosine, "total"),
    *refuse_each(NO_COUNT, lr.WSD, "total", decay=1),
    *refuse_each(NO_NUMBER, lr.Polynomial, "eta_min", total=9),
    *refuse_each(NO_NUMBER, lr.Cosine, "eta_min", total=9),
    *refuse_each(NO_NUMBER, lr.WSD, "eta_min", total=9, decay=1),
    *refuse_each(NO_NUMBER, lr.CosineWarmRestarts, "eta_min", T_0=3),
    refuse(lr.Polynomial, "eta_min must be at most lr=1.0, got 1.1", total=9, eta_min=1.1),
    refuse(lr.Cosine, "eta_min must be at most lr=1.0, got 1.1", total=9, eta_min=1.1),
    refuse(lr.WSD, "eta_min must be at most lr=1.0, got 1.1", total=9, eta_min=1.1, decay=1),
    refuse(lr.CosineWarmRestarts, "eta_min must be at most lr=1.0", T_0=3, eta_min=1.1),
    refuse(lr.Polynomial, "a warm-up of 9 steps is too long for a total of 9", total=9, warmup=9),
    refuse(lr.Cosine, "warm-up of 10 steps is too long for a total of 9", total=9, warmup=10),
    refuse(lr.WSD, "a warm-up of 9 steps is too long", total=9, warmup=9, decay=1),
    refuse(
        lr.Cosine,
        "a warm-up of 10 steps is too long for a total of 2 epochs, warm-up included",
        total=2,
        warmup_steps=10,
        steps_per_epoch=5,
    ),
    refuse(lr.Cosine, "there must be two epochs after it", total=1, **EPOCHS),
    refuse(lr.Cosine, "a warm-up of 3 epochs is too long", total=4, warmup=3, **EPOCHS),
    *refuse_each(NO_NUMBER, lr.Polynomial, "power", total=9),
    refuse(lr.Polynomial, "power must be a finite number above 0, got 0", total=9, power=0),
    *refuse_each(NO_COUNT, lr.WSD, "decay", total=9),
    refuse(
        lr.WSD,
        "a warm-up of 4 steps and a decay of 6 steps don't fit into a total of 9 steps",
        total=9,
        decay=6,
        warmup=4,
    ),
    refuse(
        lr.WSD,
        "a warm-up of 3 epochs, one stable epoch and a decay of 6 epochs don't fit into a total",
        total=9,
        decay=6,
        warmup=3,
        **EPOCHS,
    ),
    *refuse_each(NO_COUNT, lr.CosineWarmRestarts, "T_0"),
    *refuse_each(NO_COUNT, lr.CosineWarmRestarts, "T_mult", T_0=3),
    *refuse_each(NO_COUNT, lr.CosineWarmRestarts, "cycles", T_0=3),
]


@pytest.mark.parametrize("kind, settings, error, words", REFUSED)
def test_refused_settings(kind, settings, error, words):
    with pytest.raises(error) as caught:
        kind(**settings)
    assert str(caught.value).startswith(f"{kind.__name__}: ") and words in str(caught.value)


def test_the_edge_of_what_is_refused_is_allowed():
    assert lr.Cosine(1.0, 9, warmup=8)(9) == 0
    assert lr.Cosine(1.0, 2, **EPOCHS)(10) == 0
    assert lr.WSD(1.0, 9, 6, warmup=3)(3) == 1
    assert lr.WSD(1.0, 10, 6, warmup=3, **EPOCHS)(30) == 1
    assert lr.Cosine(1.0, 9, eta_min=1.0)(9) == 1
    assert lr.MultiStep(1.0, [])(10**6) == 1
    assert lr.Constant(1.0, warmup=2, warmup_lr=1.0)(0) == 1


@pytest.mark.parametrize(
    "step, error, words",
    [
        (-1, ValueError, "Cosine: step must be at least 0, got -1"),
        (1.0, TypeError, "Cosine: step must be an int, got 1.0"),
        (True, TypeError, "Cosine: step must be an int, got True"),
        (None, TypeError, "Cosine: step must be an int, got None"),
    ],
)
def test_refused_steps(step, error, words):
    with pytest.raises(error, match=words):
        lr.Cosine(1.0, 9)(step)


def test_the_base_is_no_schedule():
    with pytest.raises(TypeError, match="abstract"):
        lr.Schedule(1.0)


# -- plot ---------------------------------------------------------------------------------------


@pytest.fixture
def pyplot():
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    yield pyplot
    pyplot.close("all")


def test_plot_draws_the_curve(pyplot):
    schedule = lr.Cosine(1.0, 20, warmup=4)
    axes = schedule.plot()
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == list(range(21))
    assert list(line.get_ydata()) == [schedule(step) for step in range(21)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "lr")
    assert line.get_drawstyle() == "steps-post"
    assert pyplot.get_fignums() == [axes.figure.number]


def test_plot_in_epochs_into_given_axes(pyplot):
    _, axes = pyplot.subplots()
    schedule = lr.Step(1.0, 2, steps_per_epoch=1000, by="epoch")
    assert schedule.plot(5000, ax=axes) is axes
    x, y = axes.get_lines()[0].get_data()
    assert axes.get_xlabel() == "epoch" and (x[0], x[-1]) == (0, 5)
    assert len(x) <= 2001 and list(y) == [schedule(round(1000 * epoch)) for epoch in x]


def test_plot_refuses_in_a_sentence(monkeypatch):
    schedule = lr.Constant(1.0)
    with pytest.raises(ValueError, match=r"Constant.plot: this schedule has no end; pass steps="):
        schedule.plot()
    for steps, error in ((0, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=r"Constant.plot: steps must be a"):
            schedule.plot(steps)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"Constant.plot needs matplotlib: `pip install matplot"):
        schedule.plot(5)


def test_no_schedule_needs_matplotlib(monkeypatch):
    """Axes that somebody else made are enough, whatever they are."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    class Axes:
        def step(self, x, y, where):
            self.drawn = list(zip(x, y, strict=True)), where

        def set_xlabel(self, text):
            self.xlabel = text

        def set_ylabel(self, text):
            self.ylabel = text

    axes = Axes()
    assert lr.Constant(0.5).plot(2, axes) is axes
    assert axes.drawn == ([(0, 0.5), (1, 0.5), (2, 0.5)], "post")
