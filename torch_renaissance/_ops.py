# SPDX-License-Identifier: BSD-3-Clause
"""The one door to the compiled extension: its ops, and what it was built for."""

import importlib

import torch

__version__ = "0.1.0"

_MEND = (
    "build it in the source tree with `pip install --no-build-isolation .` "
    "or `python setup.py build_ext --inplace`"
)


def _load_extension():
    try:
        extension = importlib.import_module("torch_renaissance._C")
    except ModuleNotFoundError:
        raise ImportError(
            f"torch_renaissance has no compiled extension for this Python: {_MEND}."
        ) from None
    except ImportError as error:
        raise ImportError(
            "torch_renaissance's compiled extension was made for another torch than "
            f"{torch.__version__}: {_MEND} ({error})."
        ) from None
    built_for = extension.build_info()["torch"]
    if built_for.split(".")[:2] != torch.__version__.split(".")[:2]:
        raise ImportError(
            f"torch_renaissance's compiled extension was made for torch {built_for}, "
            f"this is torch {torch.__version__}: {_MEND}."
        )
    return extension


_C = _load_extension()
ops = torch.ops.torch_renaissance


def build_info() -> dict[str, str | None]:
    """What this build is: the package's `version`, and the `torch`, `cuda` (None where it has no
    CUDA kernels) and `compiler` that it was made with."""
    return {"version": __version__, **_C.build_info()}
