# SPDX-License-Identifier: BSD-3-Clause
# The benchmark of data: what is compared is alike, and a run. Nothing asserts a time.
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))
pytest.importorskip("torchvision", reason="it is what ours is compared with")

import bench_data
import data_report
import data_stock as stock
import report_data

CPU = torch.device("cpu")


def test_both_sides_augment_digits_alike():
    _, _, rotation, scale, erasing, normalize, _ = bench_data.transforms_of("mnist")
    assert rotation.degrees == (-stock.ROTATION, stock.ROTATION) and scale.scale == stock.SCALE
    theirs = stock.ERASING["mnist"]
    assert (erasing.p, *erasing.value) == (theirs["p"], 255 * theirs["value"])
    assert (normalize.mean, normalize.std) == (stock.MEAN["mnist"], stock.STD["mnist"])


@pytest.mark.parametrize("recipe", stock.SHAPES)
@pytest.mark.parametrize("pil", [True, False])
def test_stock_transforms_normalize(recipe, pil):
    images = stock.random_images(recipe, 4, CPU)
    transforms = stock.torchvision_transforms(recipe, pil)
    found = [transforms(stock.to_pil_image(i) if pil else i) for i in images]
    assert {(i.dtype, tuple(i.shape)) for i in found} == {(torch.float32, stock.SHAPES[recipe])}
    least = min((0 - m) / s for m, s in zip(stock.MEAN[recipe], stock.STD[recipe], strict=True))
    assert min(i.min() for i in found) >= least - 1e-5


def test_images_are_the_same_at_each_call_and_others_with_another_seed():
    first, again = (stock.random_images("mnist", 3, CPU) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, stock.random_images("mnist", 3, CPU, seed=1))


def test_stock_loaders_give_every_image_once():
    images, labels = stock.random_images("cifar", 10, CPU), torch.arange(10)
    dataset = stock.PilImages("cifar", images, labels)
    batches = list(stock.data_loader(dataset, 4, 0, CPU))
    resident = list(stock.batches_on_device("cifar", images, labels, 4))
    for found in (batches, resident):
        assert [x.shape for x, _ in found] == [(4, 3, 32, 32)] * 2
        assert len({int(label) for _, y in found for label in y}) == 8


def test_results_of_all_buffers_are_kept():
    calls = bench_data.over(lambda buffer: buffer + 1, [1, 2, 3])
    calls()
    assert calls.__closure__[-1].cell_contents == [2, 3, 4]


def test_ratios_of_what_was_measured():
    times = {"ours": {"median": 2.0}, "kornia": {"median": 5.0}}
    found = data_report.ratios_of("cpu/fp32", "cpu/mnist", {"us": {"b2b": times}})
    assert found == {"cpu/fp32/cpu/mnist/b2b/kornia over ours": 2.5}
    times = {"DataLoader + TrainStep": {"median": 6.0}, data_report.IN_STEP: {"median": 2.0}}
    found = data_report.ratios_of("cpu/fp32", "loader/mnist", {"us": {"epoch": times}})
    assert found == {
        "cpu/fp32/loader/mnist/epoch/DataLoader + TrainStep over DeviceLoader in the step": 3.0
    }
    assert data_report.ratios_of("cpu/fp32", "loader/mnist", None) == {}


def record(**settings):
    us = {"b2b": {"ours": {"median": 20.0}, data_report.ONE_DRAW: {"median": 800.0}}}
    us["graph"] = {"ours": {"median": 8.0}}
    cases = {"augment/mnist_200": {"images": 200, "us": us, "percent_of_copy": 29.0}}
    us = {"one core": {"ours": {"median": 1.0}, "torchvision, PIL": {"median": 19.0}}}
    cases["cpu/mnist"] = {"images": 100, "us": us}
    return {"settings": {"quick": False} | settings, "cases": cases}


def test_bars_of_the_cases_that_were_measured():
    found = {b["name"]: (b["reached"], b["holds"]) for b in data_report.evaluate_bars(record())}
    assert found == {
        "augment/mnist_200: µs in a graph": (8.0, True),
        "augment/mnist_200: torchvision / ours in a graph": (100.0, True),
        "cpu/mnist: torchvision, PIL / ours": (19.0, False),
    }
    assert data_report.evaluate_bars(record(quick=True)) == []


def test_arguments(capsys):
    assert bench_data.Data().parse(["--device", "cpu"]).cases == bench_data.CASES
    with pytest.raises(SystemExit):
        bench_data.Data().parse(["--cases", "imagenet"])
    assert "there is no imagenet; expected some of augment/mnist_200" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        bench_data.Data().parse(["--budget", "0"])
    assert "--budget 0.0: must be more than 0 seconds" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:TrainStep runs eagerly")
def test_quick_run_on_a_cpu(tmp_path):
    path = tmp_path / "record.json"
    cases = "augment/mnist_200,augment/cifar_1024,cpu/cifar,loader/mnist"
    args = ["--device", "cpu", "--quick", "--cases", cases, "--json", str(path)]
    assert bench_data.Data().main(args) == 0
    found = json.loads(path.read_text())["cases"]
    assert found["augment/cifar_1024"]["check"]["agrees"]
    assert "torchvision, PIL" in found["cpu/cifar"]["us"]["one core"]
    taken = found["loader/mnist"]
    assert tuple(taken["us"]["epoch"]) == report_data.WAYS
    assert (taken["images"], taken["batch"], taken["workers"]) == (8, 4, 0)
    text = "\n".join(report_data.loader([json.loads(path.read_text())]))
    assert "| mnist, 8 images, batch 4 | " in text and "–" not in text


@pytest.mark.cuda
def test_quick_run_on_a_gpu(tmp_path):
    path = tmp_path / "record.json"
    assert bench_data.Data().main(["--device", "cuda", "--quick", "--json", str(path)]) == 0
    found = json.loads(path.read_text())["cases"]
    assert found["augment/mnist_200"]["buffers"] >= 4
    assert found["augment/mnist_200"]["percent_of_copy"] > 0
