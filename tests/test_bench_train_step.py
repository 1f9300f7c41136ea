# SPDX-License-Identifier: BSD-3-Clause
# The benchmark of training steps: its cases, arguments, records, bars and rows for what fails.
# Nothing here asserts a time.
import json
import sys
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
pytest.importorskip("torchvision", reason="the models are torchvision's")

import amp_chain
import bench_train_step
import common
import shapes
import tables
import train_step_measure as measure
import train_step_variants as variants_of
from train_step_cases import BATCHES, CASES, make_batches, make_model
from train_step_variants import VARIANTS, Setting, Variant

CPU = torch.device("cpu")


def setting(case="mlp", precision="fp32", device=CPU):
    return Setting(CASES[case], make_model(CASES[case], quick=True), precision, device)


def run(tmp_path, *arguments, device="cpu"):
    """(exit status, record) of a quick run."""
    path = tmp_path / "record.json"
    threads = torch.get_num_threads()
    given = ["--quick", "--device", device, "--budget", "0.01", "--threads", "1"]
    try:
        status = bench_train_step.TrainSteps().main([*given, "--json", str(path), *arguments])
    finally:
        torch.set_num_threads(threads)
    return status, json.loads(path.read_text())


# --- cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case, same_as", [("mlp", "mnist_mlp"), ("resnet50", "resnet50"), ("vgg16_bn_b256", "vgg16_bn")]
)
def test_models_are_those_of_the_shapes(case, same_as):
    with torch.device("meta"):
        model = CASES[case].model(False)
    assert [tuple(p.shape) for p in model.parameters()] == shapes.CASES[same_as]()


def test_resnet18_has_the_stem_for_small_images():
    with torch.device("meta"):
        model = CASES["resnet18_cifar"].model(False)
        assert model.maxpool(model.conv1(torch.empty(2, 3, 32, 32))).shape == (2, 64, 32, 32)
    assert sum(p.numel() for p in model.parameters()) == 11_173_962


def test_batch_sizes_are_what_the_names_say():
    inputs = {name: case.inputs(quick=False) for name, case in CASES.items()}
    assert inputs["mlp"] == (200, 784)
    assert inputs["resnet18_cifar"] == (128, 3, 32, 32)
    assert inputs["resnet50"] == (32, 3, 224, 224)
    for name in ("resnet50_b256", "vgg16_bn_b256", "vit_b_16_b64"):
        assert inputs[name] == (int(name.rpartition("_b")[2]), 3, 224, 224)


@pytest.mark.parametrize("case", CASES)
def test_small_form_fits_its_batches(case):
    chosen = CASES[case]
    model = make_model(chosen, quick=True)
    again = make_model(chosen, quick=True)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    batches = make_batches(chosen, True, CPU)
    assert len(batches) == BATCHES
    x, y = batches[0]
    assert y.min() >= 0 and y.max() < chosen.classes
    assert not torch.equal(x, batches[1][0])
    if chosen.channels_last:
        assert x.is_contiguous(memory_format=torch.channels_last)
        assert all(
            p.is_contiguous(memory_format=torch.channels_last)
            for p in model.parameters()
            if p.ndim == 4
        )
    loss = chosen.criterion(model.eval()(x), y)
    assert loss.isfinite() and loss.ndim == 0


# --- arguments ------------------------------------------------------------------------------------


def test_defaults():
    args = bench_train_step.TrainSteps().parse(["--device", "cpu"])
    assert (args.cases, args.variants, args.precision) == (list(CASES), None, "fp32")
    assert bench_train_step.TrainSteps().parse(["--device", "cuda"]).precision == "fp16"
    assert bench_train_step.TrainSteps().parse(["--quick"]).budget < args.budget
    chain = bench_train_step.TrainSteps().parse(["--chain"])
    assert chain.cases == ["resnet50", "gpt2_124m", "gpt2_774m"]


def test_lists_are_split():
    args = bench_train_step.TrainSteps().parse(
        ["--cases", "mlp,resnet50", "--variants", "eager fused, TrainStep"]
    )
    assert args.cases == ["mlp", "resnet50"]
    assert args.variants == ["eager fused", "TrainStep"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--cases", "mlp,lenet"], "there is no lenet; expected some of mlp, "),
        (["--chain", "--cases", "mlp"], "there is no mlp; expected some of mnist_mlp, "),
        (["--variants", "jit"], "there is no jit; expected some of eager, eager fused, "),
        (["--budget", "0"], "--budget 0.0: must be more than 0 seconds"),
        (["--budget", "nan"], "--budget nan: must be more than 0 seconds"),
        (["--precision", "fp8"], "invalid choice: 'fp8'"),
        (["--fail-if-regression", "5"], "--fail-if-regression needs --compare OLD.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        bench_train_step.TrainSteps().parse(arguments)
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_which_variants_run_by_default():
    gpu = torch.device("cuda")
    assert variants_of.names_for("mlp", gpu, quick=False) == list(VARIANTS)
    without = variants_of.names_for("resnet50", gpu, quick=False)
    assert set(VARIANTS) - set(without) == {"compile max-autotune"}
    on_a_cpu = ["eager", "eager fused", "hand graph", "TrainStep"]
    assert variants_of.names_for("mlp", CPU, quick=False) == on_a_cpu


# --- variants -------------------------------------------------------------------------------------


def test_eager_is_the_plain_loop():
    chosen = setting()
    batches = make_batches(chosen.case, True, CPU)
    model = chosen.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-4)
    losses = []
    for x, y in islice(cycle(batches), measure.FIRST):
        loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert measure.first_steps(VARIANTS["eager"](chosen), batches, CPU)["losses"] == losses


@pytest.mark.parametrize("precision, scale", [("fp16", 1024.0), ("bf16", 1.0), ("fp32", 1.0)])
def test_loss_scale_is_one_that_skips_no_step(precision, scale):
    scaler = setting(precision=precision).scaler()
    assert scaler.is_enabled() is (precision == "fp16")
    assert scaler.get_scale() == scale


def test_variants_leave_the_start_as_it_was():
    chosen = setting()
    before = [p.detach().clone() for p in chosen.start.parameters()]
    measure.first_steps(VARIANTS["TrainStep"](chosen), make_batches(chosen.case, True, CPU), CPU)
    assert all(map(torch.equal, before, chosen.start.parameters()))


@pytest.mark.parametrize("as_dict", [True, False])
def test_explanation_is_kept_and_not_printed(as_dict, capsys):
    found = {"state": "captured", "nodes": 7, "more": 1}

    def explain():
        print("a table")
        return found if as_dict else SimpleNamespace(**found)

    taken = variants_of.explained(SimpleNamespace(explain=explain))
    assert taken == dict.fromkeys(variants_of.EXPLAINED) | {"state": "captured", "nodes": 7}
    assert capsys.readouterr().out == ""


# --- measuring ------------------------------------------------------------------------------------


def test_first_steps_take_batches_in_turn_and_see_the_first_replay():
    seen = []

    def step(x, y):
        seen.append((x, y))
        return torch.tensor(float(x))

    variant = Variant(step, replayed=lambda: len(seen) > 3)
    taken = measure.first_steps(variant, [(0, 0), (1, 1), (2, 2)], CPU)
    assert taken["losses"] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0]
    assert [x for x, _ in seen] == taken["losses"]
    assert taken["first_replay_s"] >= 0 and taken["start_s"] >= 0
    never = measure.first_steps(Variant(lambda x, y: torch.zeros(())), [(0, 0)], CPU)
    assert never["first_replay_s"] is None


def test_reason_is_one_line():
    error = RuntimeError("first\n\n  second\nthird" + "x" * 1000)
    assert common.reason(error) == "RuntimeError: first second"
    assert len(common.reason(ValueError("y" * 1000))) == 400


def test_rounds_interleave_and_survive_a_failure():
    calls = []

    def bad():
        calls.append("bad")
        if calls.count("bad") > 4:
            raise RuntimeError("out of memory")

    runs = {"good": lambda: calls.append("good"), "bad": bad}
    found = measure.time_rounds(runs, CPU, rounds=5, budget=1e-9)
    assert calls[:6] == ["good"] * 3 + ["bad"] * 3  # two trial runs and a turn of one, each
    assert found["bad"] == {"failed": "RuntimeError: out of memory"}
    assert found["good"]["us"]["samples"] == 5 and found["good"]["repeats"] == 1


# --- runs -----------------------------------------------------------------------------------------


def test_quick_run_on_a_cpu(tmp_path, capsys):
    status, record = run(tmp_path, "--cases", "mlp,vit_b_16_b64")
    assert status == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= tables.WIDTH
    assert record["key"] == "cpu/fp32" and record["settings"]["quick"] and record["bars"] == []
    assert {"gpu", "torch", "command", "revision"} <= record["environment"].keys()
    for case in ("mlp", "vit_b_16_b64"):
        found = record["cases"][case]["variants"]
        assert list(found) == ["eager", "eager fused", "hand graph", "TrainStep"]
        assert found["hand graph"] == {"failed": "RuntimeError: a CUDA graph needs a GPU"}
        assert "hand graph failed: RuntimeError: a CUDA graph needs a GPU" in out
        for name in ("eager", "eager fused", "TrainStep"):
            row = found[name]
            assert len(row["losses"]) == measure.FIRST and row["agrees"]
            assert row["us"]["median"] > 0 and row["us"]["samples"] >= 5
        assert found["TrainStep"]["explain"]["state"] == "eager"
        key = f"cpu/fp32/{case}/eager over TrainStep"
        expected = found["eager"]["us"]["median"] / found["TrainStep"]["us"]["median"]
        assert record["ratios"][key] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("name, status", [("TrainStep", 1), ("eager fused", 0)])
def test_variant_that_fails_is_a_row(name, status, tmp_path, monkeypatch, capsys):
    def fail(setting):
        raise RuntimeError(f"no step for {setting.case.classes} classes")

    monkeypatch.setitem(VARIANTS, name, fail)
    arguments = ["--cases", "mlp", "--variants", f"eager,{name}"]
    found_status, record = run(tmp_path, *arguments)
    found = record["cases"]["mlp"]["variants"]
    assert found_status == status
    assert found[name] == {"failed": "RuntimeError: no step for 10 classes"}
    assert found["eager"]["us"]["median"] > 0
    assert f"{name} failed: RuntimeError: no step for 10 classes" in capsys.readouterr().out


def test_other_losses_are_seen(tmp_path, monkeypatch, capsys):
    def other(setting):
        variant = VARIANTS["eager"](setting)
        return Variant(lambda x, y: 1.1 * variant.step(x, y))

    monkeypatch.setitem(VARIANTS, "eager fused", other)
    status, record = run(tmp_path, "--cases", "mlp", "--variants", "eager,eager fused")
    found = record["cases"]["mlp"]["variants"]
    assert status == 1
    assert found["eager"]["agrees"] and not found["eager fused"]["agrees"]
    assert found["eager fused"]["difference"] == pytest.approx(0.1)
    assert "DISAGREES with eager by 1.0e-01: eager fused" in capsys.readouterr().out


def test_case_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def no_model(quick):
        raise ImportError("no such model")

    monkeypatch.setitem(CASES, "odd", SimpleNamespace(model=no_model, channels_last=False))
    status, record = run(tmp_path, "--cases", "odd,mlp", "--variants", "eager")
    assert status == 1
    assert record["failed"] == {"odd": "ImportError: no such model"}
    assert list(record["cases"]) == ["mlp"]


def test_earlier_record_is_compared(tmp_path):
    old = tmp_path / "old.json"
    environment = {"gpu": None, "cpu": "a", "torch": "b"}
    ratios = {"cpu/fp32/mlp/eager over TrainStep": 1e9}  # so any time is a regression
    common.write_json(old, {"environment": environment, "ratios": ratios})
    arguments = ["--cases", "mlp", "--variants", "eager,TrainStep", "--compare", str(old)]
    assert run(tmp_path, *arguments)[0] == 0
    assert run(tmp_path, *arguments, "--fail-if-regression", "50")[0] == 1


@pytest.fixture
def tiny_chain(monkeypatch):
    monkeypatch.setitem(shapes.CASES, "tiny", lambda: [(40, 30), (40,), (7, 40), (7,)])


def test_chain(tiny_chain, tmp_path, capsys):
    status, record = run(tmp_path, "--chain", "--cases", "tiny")
    assert status == 0
    taken = record["chain"]["tiny"]
    assert list(taken["variants"]) == ["stock", "ours", "stock + EMA", "ours + EMA"]
    assert (taken["tensors"], taken["parameters"]) == (4, 1527)
    assert all(row["agrees"] for row in taken["variants"].values())
    assert all(row["us"]["median"] > 0 for row in taken["variants"].values())
    assert record["ratios"].keys() == {
        "cpu/fp32/tiny/stock over ours",
        "cpu/fp32/tiny/stock + EMA over ours + EMA",
    }
    assert max(map(len, capsys.readouterr().out.splitlines())) <= tables.WIDTH


def test_chain_that_fails_or_disagrees(tiny_chain, tmp_path, monkeypatch, capsys):
    def fail(optimizer):
        raise RuntimeError("no chain")

    monkeypatch.setattr(amp_chain, "ours_chain", fail)
    status, record = run(tmp_path, "--chain", "--cases", "tiny")
    assert status == 1
    assert record["chain"]["tiny"]["variants"]["ours"] == {"failed": "RuntimeError: no chain"}
    assert "ours failed: RuntimeError: no chain" in capsys.readouterr().out
    monkeypatch.setattr(amp_chain, "ours_chain", lambda optimizer: lambda: None)
    status, record = run(tmp_path, "--chain", "--cases", "tiny")
    assert status == 1
    assert record["chain"]["tiny"]["variants"]["ours"]["difference"] == pytest.approx(1, rel=0.1)
    assert "DISAGREES with stock by 1.0e+00: ours" in capsys.readouterr().out


def test_stock_chain_clips_and_keeps_its_gradients():
    start, gradients = amp_chain.make_start("mnist_mlp", CPU)
    own, chain = amp_chain.build("stock", start[:2], gradients[:2])
    for _ in range(3):
        chain()
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        assert norm == pytest.approx(amp_chain.MAX_NORM, rel=1e-4)
    assert not torch.equal(own[0], start[0])


# --- on a GPU -------------------------------------------------------------------------------------


@pytest.mark.cuda
def test_captured_variants_train_as_eager_does(tmp_path):
    """`status` is 1 where losses differ; kernels are {} where the profiler sees none."""
    variants = "eager,eager fused,hand graph,TrainStep"
    arguments = ["--cases", "mlp,resnet18_cifar", "--variants", variants]
    status, record = run(tmp_path, *arguments, device="cuda")
    assert status == 0
    for taken in record["cases"].values():
        for name in ("hand graph", "TrainStep"):
            row = taken["variants"][name]
            assert row["agrees"] and row["first_replay_s"] > 0
            assert row["host_us"]["samples"] >= 5
            assert row["peak_bytes"] > 0 and row["reserved_bytes"] > 0
            assert "kernels" in row or "kernels_failed" in row
        assert taken["variants"]["TrainStep"]["explain"]["state"] == "captured"
