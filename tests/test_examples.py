# SPDX-License-Identifier: BSD-3-Clause
# The demo as a user runs it, its reader on both layouts, and what it says to bad input.
import gzip
import hashlib
import importlib.util
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from urllib.error import URLError

import pytest
import torch

import torch_renaissance

Console = pytest.importorskip("rich.console", reason="the demo draws with rich").Console

DEMO = Path(__file__).parents[1] / "examples" / "mnist_mlp.py"
PACKAGE = Path(torch_renaissance.__file__).parents[1]  # so that the child imports the same one


def load_demo():
    spec = importlib.util.spec_from_file_location("mnist_mlp", DEMO)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


demo = load_demo()


def run_demo(*arguments, **environment):
    path = os.pathsep.join([str(PACKAGE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {"COLUMNS": "100", "PYTHONPATH": path, "PYTHONUTF8": "1", **environment}
    environment["OMP_NUM_THREADS"] = "1"  # steadier beside other processes
    return subprocess.run(
        [sys.executable, DEMO, "--device", "cpu", *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )


def idx(tensor):
    """The bytes of an IDX file that holds `tensor`."""
    header = bytes((0, 0, 8, tensor.dim())) + struct.pack(f">{tensor.dim()}I", *tensor.shape)
    return header + tensor.numpy().tobytes()


def write(directory, name, tensor, compress):
    directory.mkdir(parents=True, exist_ok=True)
    if compress:
        (directory / f"{name}.gz").write_bytes(gzip.compress(idx(tensor)))
    else:
        (directory / name).write_bytes(idx(tensor))


def small_mnist(directory, compress=True, train=300, test=100):
    """Images of the file beside the demo, written as a whole MNIST of `train` and `test` images."""
    images, labels = demo.read_set(DEMO.parent / "data", train=False)
    images, labels = images.view(-1, 28, 28), labels.to(torch.uint8)
    for prefix, part in (("train", slice(train)), ("t10k", slice(train, train + test))):
        write(directory, f"{prefix}-images-idx3-ubyte", images[part], compress)
        write(directory, f"{prefix}-labels-idx1-ubyte", labels[part], compress)
    return directory


def table_of(text):
    """The cells of the table's rows: name -> list of what stands in the row."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
    return {cells[0]: cells[1:] for cells in rows if len(cells) == 6 and cells[0]}


def check_report(text):
    rows = table_of(text)
    assert list(rows) == ["native", "accelerated"], text
    seconds = {name: float(cells[0].removesuffix(" s")) for name, cells in rows.items()}
    assert rows["native"][1] == "1.00×"
    assert rows["native"][4] == "–"
    ratio = seconds["native"] / seconds["accelerated"]
    shown = float(rows["accelerated"][1].removesuffix("×"))
    assert abs(shown - ratio) <= 0.005 + ratio * 0.001 / seconds["accelerated"]  # both are rounded
    losses = [float(cells[2]) for cells in rows.values()]
    assert losses[0] == pytest.approx(losses[1], rel=demo.AGREE)
    assert 0 <= float(rows["accelerated"][4]) < 0.1
    assert "The losses agree: " in text
    return rows


def test_default_data_and_table():
    result = run_demo("--epochs", 1)
    assert result.returncode == 0, result.stderr
    rows = check_report(result.stdout)
    assert "8,000 images, batch 200, CPU" in result.stdout
    assert "2,000 other images" in result.stdout
    assert result.stdout.count("epoch 1/1  ") == 2  # progress of both sides
    for cells in rows.values():
        assert float(cells[3].removesuffix("%")) > 80


@pytest.mark.parametrize("where", [".", "MNIST/raw"])
@pytest.mark.parametrize("compress", [True, False], ids=["gz", "plain"])
def test_both_layouts_are_read(tmp_path, where, compress):
    small_mnist(tmp_path / where, compress)
    images, labels, more_images, more_labels = demo.load(tmp_path, download=False)
    expected_images, expected_labels = demo.read_set(DEMO.parent / "data", train=False)
    assert torch.equal(torch.cat([images, more_images]), expected_images[:400])
    assert torch.equal(torch.cat([labels, more_labels]), expected_labels[:400])
    assert images.shape == (300, 784) and images.dtype == torch.uint8
    assert labels.dtype == torch.int64


def test_default_split_covers_the_file():
    images, labels, more_images, more_labels = demo.load(None, download=False)
    assert [len(t) for t in (images, labels, more_images, more_labels)] == [8000, 8000, 2000, 2000]
    digits = torch.cat([labels, more_labels]).bincount().tolist()
    assert digits == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    raw = gzip.decompress((DEMO.parent / "data" / "t10k-images-idx3-ubyte.gz").read_bytes())
    assert hashlib.md5(raw).hexdigest() == "2646ac647ad5339dbf082846283269ea"


def test_own_data_last_batch_smaller(tmp_path):
    small_mnist(tmp_path)
    result = run_demo("--data", tmp_path, "--epochs", 2, "--batch", 64, "--fused", "--seed", 7)
    assert result.returncode == 0, result.stderr
    check_report(result.stdout)
    assert "AdamW (fused=True), 300 images, batch 64" in result.stdout
    assert "100 other images" in result.stdout


def test_one_step_of_the_whole_set_in_80_columns(tmp_path, monkeypatch, capsys):
    small_mnist(tmp_path)
    arguments = ["--data", str(tmp_path), "--epochs", "1", "--batch", "300", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["mnist_mlp.py", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    demo.main()
    check_report(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("losses", "sentence"),
    [
        ([2.0, 1.0], "The losses agree: in no epoch are they further apart than 0.0e+00."),
        ([2.0, 1.1], "The losses differ by 1.0e-01, more than the 0.005 that rounding explains."),
        ([2.2, 1.0], "The losses differ by 1.0e-01, more than the 0.005 that rounding explains."),
        ([2.0, math.nan], "The losses are not finite: try a smaller --lr."),
        ([math.nan, 1.0], "The losses are not finite: try a smaller --lr."),
    ],
)
def test_sentence_on_the_losses(capsys, losses, sentence):
    sides = [
        SimpleNamespace(
            name=name,
            model=torch.nn.Linear(1, 1),
            seconds=[0.5, 1.5, times],
            losses=seen,
            accuracy=0.5,
        )
        for name, seen, times in (("native", [2.0, 1.0], 1.0), ("accelerated", losses, 0.25))
    ]
    data = torch.zeros(3), torch.zeros(3), torch.zeros(2), torch.zeros(2)
    args = SimpleNamespace(device="cpu", fused=False, batch=1, data=data)
    demo.report(*sides, args=args, console=Console(width=100))
    out = capsys.readouterr().out
    assert sentence in out
    assert table_of(out)["native"][:4] == ["1.000 s", "1.00×", "1.0000", "50.00%"]
    assert table_of(out)["accelerated"][:2] == ["0.500 s", "2.00×"]  # medians
    assert "(0.25–1.5)" in out


@pytest.mark.parametrize("name", ["native", "accelerated"])
def test_what_is_trained(name):
    args = SimpleNamespace(device="cpu", seed=0, lr=1e-3, fused=False)
    side = demo.prepare(name, args, steps=100)
    assert isinstance(side.optimizer, torch.optim.AdamW)
    shapes = [[list(p.shape) for p in group["params"]] for group in side.optimizer.param_groups]
    assert shapes[0] == [[1024, 784], [512, 1024], [256, 512], [10, 256]]
    assert shapes[1] == [[1024], [512], [256], [10]]
    assert [group["weight_decay"] for group in side.optimizer.param_groups] == [1e-4, 0.0]


def test_warmup_then_cosine():
    factor = demo.warmup_then_cosine(100)
    assert [factor(step) for step in (0, 4, 9, 10)] == [0.1, 0.5, 1.0, 1.0]
    assert factor(55) == pytest.approx(0.5)
    assert factor(100) == pytest.approx(0.0)
    assert demo.warmup_then_cosine(1)(0) == 1.0


def test_download(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")

    def fetch(root, download):
        assert download
        small_mnist(Path(root) / "MNIST" / "raw", compress=False)

    monkeypatch.setattr(datasets, "MNIST", fetch)
    assert len(demo.load(tmp_path / "new", download=True)[0]) == 300


def test_download_of_what_is_there(tmp_path):
    pytest.importorskip("torchvision.datasets")
    small_mnist(tmp_path / "MNIST" / "raw", compress=False)
    assert len(demo.load(tmp_path, download=True)[0]) == 300  # torchvision itself, without network


def test_download_that_fails(tmp_path, monkeypatch):
    datasets = pytest.importorskip("torchvision.datasets")

    def fetch(root, download):
        raise URLError("no network")

    monkeypatch.setattr(datasets, "MNIST", fetch)
    with pytest.raises(ValueError, match=r"MNIST could not be fetched into .*no network"):
        demo.load(tmp_path, download=True)


def main_error(capsys, monkeypatch, *arguments):
    """What `main` says on stderr as it leaves with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["mnist_mlp.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as leaving:
        demo.main()
    assert leaving.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--epochs", "0"], "--epochs 0 --batch 200: both must be at least 1."),
        (["--batch", "0"], "--epochs 5 --batch 0: both must be at least 1."),
        (["--batch", "8001"], "--batch 8001: there are only 8000 training images."),
        (["--lr", "0"], "--lr 0.0 --seed 0: lr must be > 0, seed 0 to 2**32 - 1."),
        (["--lr", "nan"], "--lr nan --seed 0: lr must be > 0"),
        (["--seed", "-1"], "--lr 0.001 --seed -1: lr must be > 0"),
        (["--epochs", "two"], "argument --epochs: invalid int value: 'two'"),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
        (["--download"], "--download needs --data DIR, the directory to fetch MNIST into."),
        (["--data", "nowhere"], "nowhere is not a directory; --download would make and fill it."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(capsys, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in main_error(capsys, monkeypatch, *arguments)


def test_no_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = main_error(capsys, monkeypatch, "--device", "cuda")
    assert "--device cuda: PyTorch finds no GPU here." in error


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
GOOD = torch.zeros(300, 28, 28, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (f"{IMAGES}.gz", None, f"has neither {IMAGES} nor {IMAGES}.gz, "),
        (f"{IMAGES}.gz", gzip.compress(idx(GOOD))[:-30], "is damaged or cut off: "),
        (IMAGES, idx(GOOD)[:-1], "is cut off: 235199 bytes follow its header, expected 235200"),
        (IMAGES, b"", "is no IDX file: it begins with ''"),
        (LABELS, idx(GOOD[:299, 0, 0]), f"has 300 images, but {{}}/{LABELS} has 299 labels"),
        (IMAGES, idx(GOOD[:, 1:]), "expected images of 1 × 28 × 28, got DeviceDataset(300 images"),
        (LABELS, idx(GOOD[:, 0, 0] + 10), f"{{}}/{LABELS}: labels[0] is 10, expected 0 to 9"),
    ],
)
def test_bad_files(capsys, monkeypatch, tmp_path, name, content, message):
    small_mnist(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_bytes(content)
    error = main_error(capsys, monkeypatch, "--data", tmp_path)
    assert message.format(tmp_path) in error


def test_bad_input_in_a_process(tmp_path):
    result = run_demo("--data", tmp_path)
    assert result.returncode == 2
    assert result.stderr.endswith("download=True) fetches them\n")
    assert "Traceback" not in result.stderr


def test_rich_missing(tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('no rich')")
    path = os.pathsep.join([str(tmp_path), str(PACKAGE), os.environ.get("PYTHONPATH", "")])
    result = run_demo(PYTHONPATH=path)
    assert result.returncode == 1
    assert "`pip install rich`, or the project's `demo` extra." in result.stderr
    assert "Traceback" not in result.stderr
