# SPDX-License-Identifier: BSD-3-Clause
# The build: what it says of itself, how a wrong one is refused, and who may include or import whom.
import ast
import graphlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torch_renaissance import _ops

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "torch_renaissance"

# design: a module imports from its own row or from rows above it, never in a circle.
LAYERS = (
    {"_C"},
    {"_ops"},
    {"regions", "amp", "ema", "loss", "lr", "init", "graphs", "data"}
    | {"_watch", "_ahead", "_captured", "_results", "_low", "_measures", "_seed", "_debug"}
    | {"_step_arguments", "_evaluation_arguments", "_batch_counts", "_weight_gradients"}
    | {"_compiled"},
    {"optim", "distributed"},
    {"accelerate", "train_step", "evaluate", "_eager", "_verify", "_precision", "_cycle"},
    {"ab", "__init__", "__main__"},
)


def includes(path):
    return re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.M)


def from_torch(header):
    return header.startswith(("torch/", "ATen/", "c10/", "pybind11/"))


def test_build_info():
    info = _ops.build_info()
    assert set(info) == {"version", "torch", "cuda", "compiler"}
    assert info["version"] == _ops.__version__
    assert info["torch"].split(".")[:2] == torch.__version__.split(".")[:2]
    assert info["cuda"] is None or re.fullmatch(r"\d+\.\d+", info["cuda"])
    assert info["compiler"]


@pytest.mark.cuda
def test_cuda_build_fits_torch():
    assert _ops.build_info()["cuda"].split(".")[0] == torch.version.cuda.split(".")[0]


@pytest.mark.parametrize(
    "extension, message",
    [
        pytest.param(None, "has no compiled extension for this Python", id="missing"),
        pytest.param(
            "def build_info(): return {'torch': '2.8.1+cpu'}",
            "was made for torch 2.8.1+cpu, this is torch 2.11.0",
            id="other-torch",
        ),
        pytest.param(
            "raise ImportError('undefined symbol: _ZN3c10')",
            "was made for another torch than 2.11.0",
            id="undefined-symbol",
        ),
        pytest.param("def build_info(): return {'torch': '2.11.2'}", None, id="same-minor"),
    ],
)
def test_wrong_build_is_refused(tmp_path, extension, message):
    """With a stand-in for torch, and without site (-S), where an editable install would step in."""
    (tmp_path / "torch.py").write_text(
        "from types import SimpleNamespace\n"
        "__version__ = '2.11.0'\n"
        "ops = SimpleNamespace(torch_renaissance=None)\n"
    )
    package = tmp_path / "torch_renaissance"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(PACKAGE / "_ops.py", package)
    if extension:
        (package / "_C.py").write_text(extension)
    result = subprocess.run(
        [sys.executable, "-S", "-c", "import torch_renaissance._ops"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    if message is None:
        assert result.returncode == 0, result.stderr
        return
    assert result.returncode != 0
    sentence = result.stderr.strip().splitlines()[-1]
    assert sentence.startswith("ImportError: ")
    assert message in sentence
    assert "`pip install --no-build-isolation .`" in sentence
    assert "`python setup.py build_ext --inplace`" in sentence
    assert result.stderr.count("Error: ") == 1, "one error, not a chain"


@pytest.mark.parametrize("wish, message", [("yes", "must be 0, 1 or unset"), ("1", "no CUDA")])
def test_setup_refuses_in_a_sentence(wish, message, monkeypatch):
    if wish == "1" and torch.version.cuda is None:
        message = "built without CUDA"
    script = (
        "import sys; from torch.utils import cpp_extension; cpp_extension.CUDA_HOME = None;"
        "import pathlib; pathlib.Path.exists = lambda self: False;"
        "sys.argv = ['setup.py', 'build_ext']; exec(open('setup.py').read())"
    )
    monkeypatch.setenv("TORCH_RENAISSANCE_CUDA", wish)
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert message in result.stderr.splitlines()[-1]


def test_kernels_include_no_torch_header():
    files = [*CSRC.glob("cuda/*.cu"), *CSRC.glob("cuda/*.cuh")]
    assert files
    assert [(f.name, h) for f in files for h in includes(f) if from_torch(h)] == []


def test_formulas_are_plain_cxx():
    files = list(CSRC.glob("math/*"))
    assert files
    for file in files:
        for header in includes(file):
            own = (file.parent / header).exists() and "/" not in header
            standard = re.fullmatch(r"[a-z_]+", header)
            assert own or standard, f"math/{file.name} includes {header}"


def test_csrc_includes_one_way():
    """math -> cpu, cuda -> bindings: math knows nobody, cpu and cuda do not know each other."""
    for device, other in (("cpu", "cuda"), ("cuda", "cpu")):
        for file in (CSRC / device).iterdir():
            reached = {(file.parent / header).resolve() for header in includes(file)}
            reached |= {CSRC / header for header in includes(file)}
            assert not [p for p in reached if p.exists() and p.parent == CSRC / other], file.name


def test_units_are_parts_that_exist_and_nothing_else():
    """A file in two units would be defined twice; one in none is compiled alone."""
    units = sorted((CSRC / "units").iterdir())
    parts = [(unit.parent / header).resolve() for unit in units for header in includes(unit)]
    assert parts and len(set(parts)) == len(parts)
    assert all(part.exists() and part.suffix in (".cpp", ".cu") for part in parts)
    for unit in units:
        code = [line for line in unit.read_text().splitlines() if line and line[:2] != "//"]
        assert all(line.startswith("#") for line in code), unit.name
        assert all(header.endswith(unit.suffix) for header in includes(unit)), unit.name


UNITS = CSRC / "units"


def parts_of(unit):
    return {(UNITS / header).resolve() for header in includes(UNITS / unit)}


def included_by_these_alone(parts):
    """They, and the headers that no other file includes."""
    files = [f for f in CSRC.rglob("*") if f.is_file()]
    by = {f: {(f.parent / h).resolve() for h in includes(f)} for f in files if f.parent != UNITS}
    found, before = set(parts), set()
    while found != before:
        before = set(found)
        for header in (f for f in files if f.suffix == ".h"):
            users = {f for f, headers in by.items() if header in headers}
            if users and users <= found:
                found.add(header)
    return found


def test_headers_that_take_long_are_included_once():
    """Each would add seconds to every file that includes it."""
    dispatcher = included_by_these_alone(parts_of("dispatcher.cpp"))
    assert CSRC / "autocast_rules.h" in dispatcher and CSRC / "backend.h" not in dispatcher
    heavy = {"torch/library.h", "ATen/core/dispatch/Dispatcher.h"}
    light = {"torch/csrc/autograd/anomaly_mode.h"}
    for file in (f for f in CSRC.rglob("*") if f.is_file()):
        headers = set(includes(file))
        long = headers & heavy | {h for h in headers if h.startswith("torch/csrc/autograd/")}
        assert not long - light or file in dispatcher, f"{file.name} includes {sorted(long)}"
        assert not headers & {"torch/extension.h", "ATen/ATen.h", "ATen/autocast_mode.h"}, file.name


def reached_from(file):
    """The file and what it includes of ours, whose directory comes before csrc/."""
    reached, new = set(), {file}
    while new:
        reached |= new
        places = [[f.parent / header, CSRC / header] for f in new for header in includes(f)]
        found = [next((path for path in both if path.is_file()), None) for both in places]
        new = {path.resolve() for path in found if path} - reached
    return reached


def test_only_the_python_unit_includes_pybind11():
    """Its header alone takes six seconds, whether anything of it is called or not."""
    brings_it = ("pybind11/", "torch/csrc/utils/")
    assert any(h.startswith(brings_it) for f in parts_of("python.cpp") for h in includes(f))
    files = {f for f in CSRC.rglob("*.c*") if f.parent.name != "units"} - parts_of("python.cpp")
    assert files
    for file in files:
        headers = {h for f in reached_from(file) for h in includes(f)}
        bad = sorted(h for h in headers if h.startswith(brings_it))
        assert not bad, f"{file.name} includes {bad}"


def source_files():
    for folder in ("csrc", "torch_renaissance", "tests", "benchmarks", "examples"):
        for pattern in ("*.py", "*.cpp", "*.h", "*.cu", "*.cuh"):
            yield from (ROOT / folder).rglob(pattern)
    yield from (ROOT / name for name in ("setup.py", "Makefile", ".ci/run"))


def test_every_source_file_names_its_licence():
    without = []
    for path in source_files():
        lines = path.read_text().splitlines()
        head = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
        if not head or "SPDX-License-Identifier: BSD-3-Clause" not in head[0]:
            without.append(str(path.relative_to(ROOT)))
    assert without == []


def imported_modules(path):
    """The package's own modules that a file imports, by their first name below the package."""
    here = path.relative_to(ROOT).with_suffix("").parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(here[: len(here) - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            names = [base if len(base) > 1 else [*base, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] != PACKAGE.name:
                continue
            module = name[1] if len(name) > 1 else "__init__"
            known = any(module in layer for layer in LAYERS)
            exists = (PACKAGE / module).is_dir() or (PACKAGE / f"{module}.py").exists()
            yield module if known or exists else "__init__"


def test_imports_point_one_way():
    rank = {module: depth for depth, layer in enumerate(LAYERS) for module in layer}
    graph = {}
    for path in PACKAGE.rglob("*.py"):
        importer = path.relative_to(PACKAGE).with_suffix("").parts[0]
        assert importer in rank, f"{importer} has no place in LAYERS"
        for module in imported_modules(path):
            if module == importer:
                continue
            assert module in rank, f"{module} has no place in LAYERS"
            assert rank[module] <= rank[importer], f"{path.name} imports {module}"
            assert module != "_C" or importer == "_ops", f"{path.name} imports _C; only _ops does"
            graph.setdefault(importer, set()).add(module)
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
