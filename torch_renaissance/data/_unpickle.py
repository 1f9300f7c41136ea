# SPDX-License-Identifier: BSD-3-Clause
"""Unpickling of numbers, texts, lists and arrays, and of nothing else: a pickle is a program."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

_DTYPES = {"u1": torch.uint8, "i4": torch.int32, "i8": torch.int64}


def unpickled(content: bytes) -> object:
    """What `content` holds: Python's own types, strings of Python 2 as bytes, and `Array`s in the
    place of numpy's.

    Raises:
        pickle.UnpicklingError: where it asks for anything else.
        Exception: of whatever kind damaged bytes lead to.
    """
    return _Unpickler(io.BytesIO(content), encoding="bytes").load()


def text(name: bytes | str) -> str:
    """A string of Python 2 or 3."""
    return name.decode() if isinstance(name, bytes) else str(name)


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str):
        known = _KNOWN.get((module.replace("numpy._core", "numpy.core"), name))
        if known is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which is not admitted")
        return known


@dataclass
class _Dtype:
    """In the place of numpy.dtype, which would believe a pickle that its bytes are pointers."""

    name: object
    align: object = False
    copy: object = False
    order: str = field(default="<", init=False)

    def __setstate__(self, state: tuple) -> None:
        self.order = text(state[1])

    def known(self) -> torch.dtype:
        name = text(self.name).lstrip("<|")
        if name not in _DTYPES or self.order == ">":
            raise pickle.UnpicklingError(
                f"it has an array of {self.order}{name}, expected {', '.join(_DTYPES)}"
            )
        return _DTYPES[name]


class Array:
    """In the place of numpy.ndarray; `tensor` shares no memory with the pickle."""

    tensor: Tensor | None = None

    def __setstate__(self, state: tuple) -> None:
        _version, shape, dtype, fortran, content = state
        self._fill(content, dtype, shape, fortran)

    def _fill(self, content, dtype: _Dtype, shape: tuple, fortran: bool) -> None:
        expected = math.prod(shape) * dtype.known().itemsize
        if len(content) != expected or expected == 0:
            raise pickle.UnpicklingError(
                f"it has an array of {len(content)} bytes, expected {expected}"
            )
        tensor = torch.frombuffer(bytearray(content), dtype=dtype.known())
        backwards = tuple(reversed(range(len(shape))))
        self.tensor = tensor.view(shape[::-1]).permute(backwards) if fortran else tensor.view(shape)


def _from_buffer(content, dtype: _Dtype, shape: tuple, order: str) -> Array:
    array = Array()
    array._fill(content, dtype, shape, text(order) == "F")
    return array


_KNOWN: dict[tuple[str, str], Callable] = {
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, dtype: Array(),
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): lambda string, encoding: string.encode("latin1"),
    ("builtins", "bytearray"): bytearray,
}
