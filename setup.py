# SPDX-License-Identifier: BSD-3-Clause
# Builds torch_renaissance._C: CPU kernels always, CUDA kernels where a toolkit is found.
# TORCH_RENAISSANCE_CUDA=1 demands CUDA kernels, =0 leaves them out.
import os
import re
import subprocess
import sys
from glob import glob
from pathlib import Path

from setuptools import setup

try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    sys.exit(
        "torch_renaissance is built against the torch it will run with: `pip install torch ninja`, "
        f"then `pip install --no-build-isolation .` ({error})"
    )

CXX_FLAGS = [
    # What the kernels gain by -O3 is these; the rest of it takes a sixth of the build.
    "-O2",
    "-fvect-cost-model=dynamic",
    "-funswitch-loops",
    "-fpeel-loops",
    "-g0",
    "-ffp-contract=off",
    "-fno-math-errno",  # sqrt and exp as instructions and plain loops; IEEE results either way
    "-fno-trapping-math",
    "-fopenmp",  # only here: at run time the symbols come from the OpenMP that torch has loaded
    "-fvisibility=hidden",
    "-Wall",
    "--param=ggc-min-heapsize=524288",  # KiB before the compiler looks for garbage: a tenth faster
]
NVCC_FLAGS = [
    "-O3",
    "-fmad=false",  # the formulas say where to fuse
    "-lineinfo",
    "-Xcompiler=-fvisibility=hidden,-Wall",
    # torch forbids these conversions in its own kernels; ours include no torch header
    "-U__CUDA_NO_HALF_OPERATORS__",
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_HALF2_OPERATORS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
]
# Where no GPU is visible: the oldest target, which newer GPUs translate at first use. A second one
# doubles nvcc's time; set TORCH_CUDA_ARCH_LIST to build for other machines.
DEFAULT_ARCHES = "8.0+PTX"


def find_toolkit():
    """Return (home, version) of a CUDA toolkit that fits torch, or a sentence why there is none."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a CUDA build of torch"
    major = torch.version.cuda.split(".")[0]
    # nvcc may be a wrapper script outside the toolkit, and torch then points beside it.
    homes = [home for home in (cpp_extension.CUDA_HOME, "/usr/local/cuda") if home]
    for home in map(Path, homes):
        nvcc = home / "bin" / "nvcc"
        if not nvcc.exists() or not (home / "include" / "cuda_runtime.h").exists():
            continue
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
        release = re.search(r"release (\d+)\.(\d+)", text)
        if not release:
            return f"{nvcc} --version names no release; set CUDA_HOME to a CUDA {major} toolkit"
        if release[1] != major:
            return (
                f"the toolkit in {home} is CUDA {release[1]}.{release[2]} but torch "
                f"{torch.__version__} is built for CUDA {torch.version.cuda}; "
                f"set CUDA_HOME to a CUDA {major} toolkit"
            )
        return str(home), f"{release[1]}.{release[2]}"
    return (
        f"no CUDA toolkit (bin/nvcc, include/cuda_runtime.h) in {' or '.join(homes)}; "
        f"install CUDA {major} or set CUDA_HOME to it"
    )


def choose_toolkit():
    """Return (home, version) of the toolkit to build with, or None for CPU kernels only."""
    wish = os.environ.get("TORCH_RENAISSANCE_CUDA", "")
    if wish not in ("", "0", "1"):
        sys.exit(f"TORCH_RENAISSANCE_CUDA must be 0, 1 or unset, not {wish!r}")
    found = None if wish == "0" else find_toolkit()
    if isinstance(found, str):
        if wish == "1":
            sys.exit(f"TORCH_RENAISSANCE_CUDA=1, but {found}, or leave CUDA out with =0")
        print(f"torch_renaissance: building without CUDA kernels: {found}")
        return None
    return found


def compiled(*patterns):
    """Return the files to compile: csrc/units/ has those that are quicker compiled as one."""
    sources = {file for pattern in patterns for file in glob(pattern)}
    parts = {}
    for unit in glob("csrc/units/*"):
        included = re.findall(r'^#include "\.\./(.+)"', Path(unit).read_text(), re.M)
        parts[unit] = sources.intersection(f"csrc/{file}" for file in included)
    units = [unit for unit in parts if parts[unit]]
    # The units first: the longest of all should not be what the others have to wait for.
    return [*sorted(units), *sorted(sources.difference(*parts.values()))]


def extension():
    patterns = ["csrc/*.cpp", "csrc/cpu/*.cpp"]
    macros = [("TR_TORCH_VERSION", f'"{torch.__version__}"')]
    make = cpp_extension.CppExtension
    toolkit = choose_toolkit()
    if toolkit:
        cpp_extension.CUDA_HOME, version = toolkit
        patterns += ["csrc/cuda/*.cpp", "csrc/cuda/*.cu"]
        macros += [("TR_WITH_CUDA", "1"), ("TR_CUDA_VERSION", f'"{version}"')]
        make = cpp_extension.CUDAExtension
        if not torch.cuda.device_count():  # else torch takes the GPUs it sees
            os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_ARCHES)
    return make(
        "torch_renaissance._C",
        compiled(*patterns),
        include_dirs=[os.path.abspath("csrc")],
        define_macros=macros,
        depends=sorted(glob("csrc/**/*.*", recursive=True)),
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
    )


class BuildExtension(cpp_extension.BuildExtension):
    """Keeps objects in one place however the build is started: ninja remakes what changed."""

    def finalize_options(self):
        super().finalize_options()
        self.build_temp = f"build/{sys.implementation.cache_tag}-torch-{torch.__version__}"

    def swig_sources(self, sources, extension):
        return extension.sources  # in their order, which setuptools has lost: ninja goes by it


# `license` is not in pyproject.toml since old and new setuptools want it there in different forms.
setup(
    license="BSD-3-Clause",
    ext_modules=[extension()],
    cmdclass={"build_ext": BuildExtension},
)
