# SPDX-License-Identifier: BSD-3-Clause
"""`module:function`: a model of the user's own, and whose code it was that raised."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path

from torch import nn

from .compare import reason
from .near import near

FORM = "module:function, as in my_models:small"


def function_of(name: str) -> Callable:
    """What "module:function" names.

    Raises:
        ValueError: where there is no such module or function.
        Exception: what the module raised when imported; `whose` tells it from ours.
    """
    module_name, _, function_name = name.partition(":")
    if not all([*module_name.split("."), function_name]):
        raise ValueError(f"a model of your own is named as {FORM}, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    module = _imported(module_name, name)
    missing = object()
    function = getattr(module, function_name, missing)
    if function is missing:
        known = [key for key, value in vars(module).items() if callable(value)]
        suggestion = near(function_name, known)
        raise ValueError(f"{module_name} has no function {function_name!r}{suggestion}")
    if not callable(function):
        raise ValueError(
            f"{name} must be a function, but is of type {type(function).__name__}, which can't be "
            "called"
        )
    return function


def _imported(module_name: str, name: str):
    try:
        return blamed(f"importing {module_name}", importlib.import_module)(module_name)
    except ModuleNotFoundError as error:
        # Of a package's module, what isn't there may be the package.
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"there is no module {module_name!r} to import, of {name!r}; start in its directory or "
            "set PYTHONPATH"
        ) from error


def arguments_of(name: str, function: Callable, options: dict) -> dict:
    """Those of the options that are parameters of the function.

    Raises:
        ValueError: where it has others without a default.
    """
    wanted = inspect.signature(function).parameters.values()
    named = [p for p in wanted if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unknown = [p.name for p in named if p.default is p.empty and p.name not in options]
    if unknown:
        raise ValueError(
            f"{name} has the parameters {', '.join(unknown)} without a default, but is given "
            f"{' and '.join(options)} alone"
        )
    return {p.name: options[p.name] for p in named if p.name in options}


def own(name: str, options: dict) -> tuple:
    """What the function of that name returns, called with those of the options that it takes."""
    function = function_of(name)
    found = blamed(name, function)(**arguments_of(name, function, options))
    if not isinstance(found, tuple) or len(found) != 4:
        raise ValueError(
            f"{name} must return (make_model, make_optimizer, loss_fn, batch), as ab_test takes "
            f"them, got {type(found).__name__}"
            + (f" of {len(found)}" if isinstance(found, tuple) else "")
        )
    make_model, make_optimizer, loss_fn, batch = found
    return (
        blamed(f"make_model of {name}", make_model),
        blamed(f"make_optimizer of {name}", make_optimizer),
        loss_fn,  # what it raises is the reason of a row
        blamed(f"batch of {name}", batch),
    )


def call_as_text(name: str, options: dict) -> str:
    """The call that `own` makes: what model, optimizer and batch are, only the function knows."""
    given = arguments_of(name, function_of(name), options)
    return f"{name}({', '.join(f'{key}={value}' for key, value in given.items())})"


# --- whose exception it was -----------------------------------------------------------------------


def blamed(who: str, function):
    """The same function, whose exceptions remember `who` raised them, and are otherwise as they
    were: they have to stay OutOfMemoryError and the like. What isn't a function is left alone."""
    if not callable(function) or isinstance(function, nn.Module):
        return function

    @functools.wraps(function)
    def call(*args, **options):
        try:
            return function(*args, **options)
        except Exception as error:
            error.raised_by = who, _place(error, function)
            raise

    return call


def whose(error: Exception) -> str:
    """A sentence about what the user's code raised; nothing for what is ours."""
    if not hasattr(error, "raised_by"):
        return ""
    who, place = error.raised_by
    return f"{who} raised {reason(error)}, at {place}"


def _place(error: Exception, function: Callable) -> str:
    """File and line of the innermost frame that is the user's code; for what is no frame of it,
    such as a call with wrong arguments, where the function begins."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    ours = [Path(path).resolve() for path in [*ours, Path(__file__).parents[1]]]
    frames = traceback.extract_tb(error.__traceback__)[1:]  # without `call`
    frames = [f for f in frames if f.name != "import_module" and f.filename[0] != "<"]
    theirs = [
        frame
        for frame in frames
        if not any(path in Path(frame.filename).resolve().parents for path in ours)
    ]
    if frames:
        frame = theirs[-1] if theirs else frames[0]
        return f"{frame.filename}:{frame.lineno}"
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)
