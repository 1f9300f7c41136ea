# SPDX-License-Identifier: BSD-3-Clause
# tr.ab_test: which variant is recommended where gains are small or doubtful, and which variants the
# budget has room for.
import re
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torch_renaissance as tr
from torch_renaissance.ab import models
from torch_renaissance.ab.compare import Comparison
from torch_renaissance.ab.measure import Times
from torch_renaissance.ab.report import AbResult, Row
from torch_renaissance.ab.run import layout_notes
from torch_renaissance.ab.setting import Setting
from torch_renaissance.ab.variants import COMPILED, VARIANTS


def advice(*rows):
    """Of (name, ratio, spread) after eager, on a CPU; halves and the number of turns may follow."""
    found = [Row("eager", wall=Times(1e3, 1e3, 1e3, 9), ratio=Times(1.0, 1.0, 1.0, 9))]
    for name, ratio, spread, *rest in rows:
        halves, turns = rest if len(rest) == 2 else (rest[0] if rest else [], 9)
        wall = 1e3 / ratio
        times = Times(ratio, ratio - spread, ratio + spread, turns)
        found.append(Row(name, wall=Times(wall, wall, wall, turns), ratio=times, halves=halves))
    return AbResult("synthetic", "cpu", "fp32", 1, rows=found).advice


# --- advice ---------------------------------------------------------------------------------------


def test_the_simpler_of_equals_must_gain_too():
    text = advice(("eager fused", 1.01, 0.05), ("accelerate", 1.07, 0.06))
    assert text.startswith("Use accelerate: accelerate is 1.07 ± 0.06 times as fast as eager. ")
    assert "eager fused" not in text
    text = advice(("eager fused", 1.045, 0.001), ("accelerate", 1.06, 0.05))
    assert text.startswith("Use accelerate: "), "4 % are little, with whatever spread"
    text = advice(("eager fused", 1.06, 0.01), ("accelerate", 1.07, 0.02))
    assert text.startswith("Use eager fused: ")
    assert "accelerate is no faster beyond the spread." in text


def test_the_fastest_may_be_doubtful_where_another_is_not():
    text = advice(("accelerate", 1.2, 0.02), ("compile", 1.5, 0.6))
    assert text.startswith("Use accelerate: accelerate is 1.20 ± 0.02 times as fast as eager. ")
    assert (
        "Not considered: compile is 1.50 ± 0.60 times as fast as eager, within the spread; more"
        in text
    )


@pytest.mark.parametrize("halves", [[2.0, 1.0], [1.0, 2.0], [1.375, 1.125]])
def test_halves_that_differ_by_the_gain_leave_it_open(halves):
    text = advice(("accelerate", 1.25, 0.02, halves))
    first, second = halves
    assert text.startswith(
        "No gain can be told from this run: accelerate is 1.25 ± 0.02 times as fast as eager, but "
        f"{first:.2f} in the first half of the turns and {second:.2f} in the second. Keep eager; "
        "more steps, a larger budget or a quieter machine would tell. "
    )


def test_halves_that_differ_by_less_do_not():
    assert advice(("accelerate", 1.25, 0.02, [1.3, 1.2])).startswith("Use accelerate: ")
    assert advice(("accelerate", 9.0, 0.02, [12.0, 7.0])).startswith("Use accelerate: ")
    text = advice(("accelerate", 1.25, 0.02, [1.3, 1.2]), ("TrainStep", 1.4, 0.02, [1.9, 1.1]))
    assert text.startswith("Use accelerate: ")
    assert "Not considered: TrainStep is 1.40" in text and "1.10 in the second" in text


def test_one_turn_tells_nothing():
    text = advice(("accelerate", 1.5, 0.0, [], 1))
    assert text.startswith("No gain can be told from this run: ")
    assert "but in a single turn, which nothing confirms. Keep eager; more steps" in text


def test_whatever_leaves_a_gain_open_is_said_in_one_form():
    doubts = {
        "within the spread": ("accelerate", 1.5, 0.6),
        "but in a single turn": ("accelerate", 1.5, 0.0, [], 1),
        "but 2.00 in the first half": ("accelerate", 1.5, 0.1, [2.0, 1.1]),
    }
    for doubt, row in doubts.items():
        begin, rest = advice(row).split(f", {doubt}")
        assert begin.startswith("No gain can be told from this run: accelerate is 1.50 ± 0.")
        assert (
            ". Keep eager; more steps, a larger budget or a quieter machine would tell. On" in rest
        )


def test_little_gain_has_no_doubts_beyond_its_spread():
    text = advice(("accelerate", 1.02, 0.01, [1.03, 1.01]))
    assert text.startswith(
        "There is little to gain here: accelerate is 1.02 ± 0.01 times as fast as"
    )
    assert "as eager. Keep eager. " in text
    assert "0.98 ± 0.05 times as fast as eager, within the spread. Keep eager. " in advice(
        ("accelerate", 0.98, 0.05)
    )


# --- the budget -----------------------------------------------------------------------------------


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_fn(model, x):
    return F.mse_loss(model(x), x)


def comparison(modules, budget=100.0, device="cpu"):
    setting = Setting(nn.Identity, make_optimizer, loss_fn, torch.device(device))
    begin = time.perf_counter()
    return Comparison(setting, modules, [()], dict(VARIANTS), set(), budget, begin, None, None)


def test_small_models_are_compiled_on_a_cpu_and_large_ones_are_not():
    mlp = sum(1 for _ in models.mlp().modules())
    assert comparison(mlp)._why_not("compile") == ""
    assert comparison(68)._why_not("compile").startswith("compiling may take 127 s and timing 35 s")
    assert comparison(68, budget=1000.0)._why_not("compile") == ""
    assert comparison(68, budget=300.0, device="cuda")._why_not("compile") == ""
    measured = comparison(68)
    measured.compile_s = 10.0
    assert measured._why_not("TrainStep compile") == ""


def test_why_a_variant_is_left_out_names_all_that_is_in_its_way():
    def make_model():
        return nn.Linear(8, 8)

    result = tr.ab_test(
        make_model, make_optimizer, loss_fn, (torch.ones(2, 8),), budget=10.0, progress=False
    )
    for name in COMPILED:
        row = result.row(name)
        assert row.status == "left out" and row.reason.startswith("compiling may take ")
        found = [float(number) for number in re.findall(r"([\d.]+) s\b", row.reason)]
        expected, timing, left, budget = found
        assert expected + timing > left and left <= budget == 10.0
        assert timing == pytest.approx(3.5), "35 % of the budget"


GPU, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "precision", "channels_last", "said"),
    [
        (GPU, "fp16", False, True),
        (GPU, "bf16", False, True),
        (GPU, "fp16", True, False),
        (GPU, "fp32", False, False),
        (CPU, "bf16", False, False),
    ],
)
def test_a_memory_format_that_is_slower_is_named(device, precision, channels_last, said):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1))
    if channels_last:
        model.to(memory_format=torch.channels_last)
    found = layout_notes(model, device, precision)
    assert ["--channels-last" in note for note in found] == [True] * said
    assert layout_notes(nn.Linear(3, 3), device, precision) == []
