# SPDX-License-Identifier: BSD-3-Clause
"""What a captured step took from Python: found in the loss function and its modules, watched."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType

import torch
from torch import Tensor, nn
from torch.nn.modules import module as _module
from torch.optim import optimizer as _optimizer

from ._ops import _C

_VALUES = (int, float, complex, bool, str, type(None), torch.dtype, torch.device)
_KEPT = (Tensor, nn.Module, FunctionType, list, tuple, dict)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_KNOWN = ("torch", "torchvision", "torch_renaissance")  # packages whose code is trusted
_DEPTH = 4  # functions that call functions
_LONGEST = 64  # entries of a container that are looked at


@dataclass
class Found:
    """Modules, and single values by where they are kept."""

    modules: dict[nn.Module, str] = field(default_factory=dict)
    cells: list[tuple[object, str]] = field(default_factory=list)
    items: list[tuple[dict, str, str]] = field(default_factory=list)
    containers: list[tuple[dict | list, str]] = field(default_factory=list)
    tensors: dict[Tensor, str] = field(default_factory=dict)
    functions: set[Callable] = field(default_factory=set)
    compiled: bool = False  # whether torch.compile has made one of the functions
    # By which function's names an object has been looked into, which may lead back to itself.
    objects: set[tuple[int, Callable]] = field(default_factory=set)


def look_into(*functions: Callable) -> Found:
    """Closures, globals, defaults, partial arguments and `self` of loss functions and of the
    Python functions that they name."""
    found = Found()
    for function in functions:
        _look(function, getattr(function, "__qualname__", type(function).__name__), found, _DEPTH)
    return found


def _look(value: object, name: str, found: Found, depth: int) -> None:
    if isinstance(value, nn.Module):
        found.modules.setdefault(value, name)
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            _look(part, name, found, depth)
    elif isinstance(value, MethodType):
        _look_into_object(value.__self__, value.__func__, name, found, depth)
        _look(value.__func__, name, found, depth)
    elif isinstance(value, FunctionType):
        inner = getattr(value, "_torchdynamo_orig_callable", None)
        if inner is not None:
            found.compiled = True
            _look(inner, name, found, depth)
        elif depth > 0 and value not in found.functions and not _is_torchs(value):
            found.functions.add(value)
            _look_into_function(value, name, found, depth)
    elif isinstance(value, (list, tuple, dict)):
        _look_into_container(value, name, found, depth)
    elif isinstance(value, Tensor):
        found.tensors.setdefault(value, name)
    elif not isinstance(value, (*_VALUES, ModuleType, type)):
        call = type(value).__call__ if callable(value) else None
        if isinstance(call, FunctionType) and not _is_torchs(type(value)):
            _look(MethodType(call, value), name, found, depth)


def _look_into_container(value: list | tuple | dict, name: str, found: Found, depth: int) -> None:
    if isinstance(value, dict | list):
        found.containers.append((value, name))
    if len(value) <= _LONGEST and depth > 0:
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        for key, part in parts:
            _look(part, f"{name}[{key!r}]", found, depth - 1)


def _look_into_function(function: FunctionType, name: str, found: Found, depth: int) -> None:
    for variable, cell in zip(
        function.__code__.co_freevars, function.__closure__ or (), strict=True
    ):
        where = f"{variable!r} in the closure of {name}"
        found.cells.append((cell, where))
        try:
            content = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        _look_at(content, function, where, found, depth)
    for variable in sorted(set(_names(function.__code__))):
        if variable in function.__globals__:
            content = function.__globals__[variable]
            where = f"the global {variable!r}"
            if isinstance(content, (*_VALUES, *_KEPT)):
                found.items.append((function.__globals__, variable, f"the globals of {name}"))
            if isinstance(content, ModuleType) and not _is_known(content.__name__):
                _look_into_module(content, function, found)
            _look_at(content, function, where, found, depth)
    for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        _look(default, name, found, depth - 1)


def _look_at(content: object, function: FunctionType, where: str, found: Found, depth: int) -> None:
    if isinstance(content, (*_KEPT, MethodType, functools.partial)):
        _look(content, where, found, depth - 1)
        if isinstance(content, nn.Module):
            _look_into_object(content, function, where, found, depth)
    elif not isinstance(content, (*_VALUES, ModuleType, type)):
        _look_into_object(content, function, where, found, depth)
        _look(content, where, found, depth - 1)


def _look_into_object(
    owner: object, function: FunctionType, name: str, found: Found, depth: int
) -> None:
    """Of an object only what the function names: others of its attributes may change freely."""
    if isinstance(owner, nn.Module):
        found.modules.setdefault(owner, name)
    looked_at = id(owner), function
    if looked_at in found.objects or not hasattr(owner, "__dict__") or _is_torchs(type(owner)):
        return
    found.objects.add(looked_at)
    attributes = vars(owner)
    if not isinstance(attributes, dict):
        return
    is_module = isinstance(owner, nn.Module)
    if is_module:
        attributes = attributes | owner._modules
    for attribute in sorted(set(_names(function.__code__))):
        if attribute not in attributes:
            method = getattr(type(owner), attribute, None)
            method = method.fget if isinstance(method, property) else method
            if isinstance(method, FunctionType) and depth > 0 and not _is_torchs(method):
                _look(MethodType(method, owner), f"{name}.{attribute}", found, depth - 1)
            continue
        content = attributes[attribute]
        if isinstance(content, (*_VALUES, *_KEPT)) and not is_module:  # which is watched whole
            found.items.append((attributes, attribute, name))
        _look_at(content, function, f"{name}.{attribute}", found, depth - 1)


def _look_into_module(module: ModuleType, function: FunctionType, found: Found) -> None:
    for variable in sorted(set(_names(function.__code__)) & vars(module).keys()):
        if isinstance(vars(module)[variable], (*_VALUES, *_KEPT)):
            found.items.append((vars(module), variable, f"the module {module.__name__}"))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def names_one_of(names: set[str], function: FunctionType) -> bool:
    """Whether the code of `function` names a variable or an attribute so."""
    return not names.isdisjoint(_names(function.__code__))


def _is_torchs(what: object) -> bool:
    return _is_known(getattr(what, "__module__", None) or "")


def _is_known(module: str) -> bool:
    return module.split(".")[0] in _KNOWN


def forwards(modules: Iterable[nn.Module]) -> list[Callable]:
    """The forward passes of modules that aren't torch's own."""
    return [m.forward for m in modules if not _is_torchs(type(m)) or "forward" in vars(m)]


def all_modules(roots: dict[nn.Module, str]) -> dict[nn.Module, str]:
    """Every module below `roots`, with a name for messages."""
    found: dict[nn.Module, str] = {}
    for root, root_name in roots.items():
        for name, module in root.named_modules():
            found.setdefault(module, f"{root_name}.{name}" if name else root_name)
    return found


def is_compiled(module: nn.Module) -> bool:
    """By `torch.compile(module)` or `module.compile()`."""
    by_call = getattr(module, "_compiled_call_impl", None) is not None
    return by_call or type(module).__module__.startswith("torch._dynamo.")


def unseen(modules: dict[nn.Module, str]) -> str:
    """Which module keeps its values where a watch doesn't see them change, or ''."""
    for module, name in modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            return f"{name} is a torch.jit.ScriptModule, which keeps its values outside of Python"
    return ""


def watch(found: Found, modules: dict[nn.Module, str], optimizer: torch.optim.Optimizer | None):
    """Everything of these that a replay takes for granted, as it is now."""
    w = _C.Watch()
    for module, name in modules.items():
        for key in (None, "_parameters", "_buffers", "_modules"):
            part = vars(module) if key is None else vars(module).get(key)
            if part is not None:
                w.add_dict(part, name)
    for cell, name in found.cells:
        w.add_cell(cell, name)
    for owner, key, name in {(id(o), k): (o, k, n) for o, k, n in found.items}.values():
        w.add_item(owner, key, name)
    for container, name in {id(c): (c, n) for c, n in found.containers}.values():
        if isinstance(container, dict):
            w.add_dict(container, name)
        else:
            w.add_item({"contents": container}, "contents", name)
    for key in _GLOBAL_HOOKS:
        w.add_dict(getattr(_module, key), f"torch's {key}")
    if optimizer is None:
        return w
    w.add_item(vars(optimizer), "step", "the optimizer")
    for key in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        w.add_dict(vars(optimizer)[key], f"the optimizer's {key}")
    for owner in (_optimizer._global_optimizer_pre_hooks, _optimizer._global_optimizer_post_hooks):
        w.add_dict(owner, "torch's global optimizer hooks")
    return w


def forward_hooks(modules: dict[nn.Module, str]) -> str:
    """Which hook of the program a replay of a forward pass would not run, or ''."""
    return _module_hooks(modules, _GLOBAL_HOOKS[:2], _HOOKS[:2])


def _module_hooks(modules: dict[nn.Module, str], of_torch: tuple, of_modules: tuple) -> str:
    for key in of_torch:
        if getattr(_module, key):
            return f"torch.nn.modules.module.{key} has hooks"
    for module, name in modules.items():
        for key in of_modules:
            for hook in (vars(module).get(key) or {}).values():
                if not _is_trusted(hook):
                    return f"{name} ({type(module).__name__}) has a hook in {key}: {_title(hook)}"
    return ""


def hooks(modules: dict[nn.Module, str], optimizer: torch.optim.Optimizer) -> str:
    """Which hook of the program a replay of a step would not run, or ''."""
    reason = _module_hooks(modules, _GLOBAL_HOOKS, _HOOKS)
    if reason:
        return reason
    for key in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        for hook in vars(optimizer)[key].values():
            if not _is_trusted(hook):
                return f"the optimizer has a hook in {key}: {_title(hook)}"
    if _optimizer._global_optimizer_pre_hooks or _optimizer._global_optimizer_post_hooks:
        return "torch.optim has global step hooks"
    named = {
        p: f"{n}.{k}" for m, n in modules.items() for k, p in m._parameters.items() if p is not None
    }
    for group in optimizer.param_groups:
        for p in group["params"]:
            if _C.has_hooks(p):
                return f"{named.get(p, 'a parameter')} has a tensor hook"
    return ""


def _is_trusted(hook: object) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return _is_torchs(hook) or _is_torchs(type(hook))


def _title(hook: object) -> str:
    name = getattr(hook, "__qualname__", type(hook).__name__)
    try:
        return f"{name} ({inspect.getsourcefile(hook)}:{inspect.getsourcelines(hook)[1]})"
    except (TypeError, OSError):
        return name
