"""A spec from a user's Python file: build() -> (module, args, kwargs), if it likes loss(output) and DYNAMIC.

The file runs as `python FILE.py` would find it: its folder is on the import path while the file and its build() run.
Overrides go to the keyword parameters of build() with the same names (batch, seq_len, layers, dtype).
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from ..plans.errors import RequestError
from .spec import Overrides, Spec

__all__ = ["file_spec"]

_SHAPE = "def build(): return module, args, kwargs"


def file_spec(path: Path, function: str | None, overrides: Overrides, *, name: str) -> Spec:
    """The spec in `path`, built by `function` (build when None). Runs the file."""
    if not path.is_file():
        raise RequestError(f"'spec' must name an existing Python file, got {str(path)!r}; check the path")
    module = _run_file(path.resolve())
    builder = _builder(module, path, "build" if function is None else function)
    keywords = _keywords(builder, path, overrides)
    loss = _loss(module, path)

    def build() -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        options = _with_torch_dtype(keywords)
        with _reported(path), _on_import_path(path.resolve().parent):
            result = builder(**options)
        return _checked(result, f"{path}:{_first_line(builder)}", builder.__name__)

    return Spec(name=name, build=build, loss=loss, dynamic=getattr(module, "DYNAMIC", None))


def _run_file(path: Path) -> ModuleType:
    # The name depends on the file's name only, so that what is recorded of its classes holds in another folder.
    name = f"meshwright_spec_{path.stem.replace('.', '_')}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    before = sys.modules.get(name)
    sys.modules[name] = module  # dataclasses and typing look their module up here
    try:
        with _reported(path), _on_import_path(path.parent):
            found.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


def _builder(module: ModuleType, path: Path, function: str) -> Callable[..., Any]:
    builder = getattr(module, function, None) if function else None
    if builder is None or not callable(builder) or not hasattr(builder, "__name__"):
        local = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        rule = f"'spec' must name a function of {path}, got {function!r}"
        raise RequestError(f"{rule}; its functions are {', '.join(local) or 'none'}; add: {_SHAPE}")
    return builder


def _loss(module: ModuleType, path: Path) -> Callable[[Any], Any] | None:
    loss = vars(module).get("loss")
    if loss is not None and not callable(loss):
        raise RequestError(f"'loss' must be a function of the module's output, got {loss!r}; {path}; def loss(output)")
    return loss


def _keywords(builder: Callable[..., Any], path: Path, overrides: Overrides) -> dict[str, Any]:
    """The overrides as keyword arguments of `builder`."""
    given = overrides.given()
    parameters = inspect.signature(builder).parameters
    named = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    single = {n: p for n, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}
    needed = [n for n, p in single.items() if p.default is p.empty]
    where = f"{path}:{_first_line(builder)}"
    for name, value in given.items():
        if name not in named and not takes_any:
            rule = f"{name!r} must be left out for a spec whose {builder.__name__}() does not take it, got {value!r}"
            raise RequestError(f"{rule}; at {where}; give {builder.__name__}() a parameter {name}=...")
    if missing := [name for name in needed if name not in given]:
        rule = f"{builder.__name__!r} must need no arguments but overrides, got parameters without a value: {missing}"
        raise RequestError(f"{rule}; at {where}; give them defaults")
    return dict(given)


def _with_torch_dtype(keywords: dict[str, Any]) -> dict[str, Any]:
    if "dtype" not in keywords:
        return keywords
    import torch

    return {**keywords, "dtype": getattr(torch, keywords["dtype"])}


def _checked(result: object, where: str, function: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from torch import nn

    if not isinstance(result, tuple | list) or len(result) != 3:
        got = f"{type(result).__name__} of {len(result)}" if isinstance(result, tuple | list) else type(result).__name__
        raise RequestError(f"'{function}()' must return (module, args, kwargs), got {got}; at {where}; {_SHAPE}")
    module, args, kwargs = result
    wants = (("module", module, nn.Module), ("args", args, (tuple, list)), ("kwargs", kwargs, dict))
    for part, value, kind in wants:
        if not isinstance(value, kind):
            need = {"module": "an nn.Module", "args": "a tuple", "kwargs": "a dict"}[part]
            rule = f"the {part} of '{function}()' must be {need}, got {type(value).__name__}"
            raise RequestError(f"{rule}; at {where}; {_SHAPE}")
    return module, tuple(args), kwargs


@contextmanager
def _on_import_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turns what goes wrong in the user's file into a RequestError with file and line."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        rule = f"{path.name!r} must run without an error, got {what}; at {_where(error, path)}"
        raise RequestError(f"{rule}; mend it there") from error


def _where(error: BaseException, path: Path) -> str:
    """The innermost line of the user's file in the traceback, or that of the syntax error."""
    if isinstance(error, SyntaxError) and error.filename and Path(error.filename).is_file():
        return f"{error.filename}:{error.lineno or 1}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if Path(f.filename).resolve() == path.resolve()]
    return f"{path}:{own[-1].lineno}" if own else str(path)


def _first_line(function: Callable[..., Any]) -> int:
    code = getattr(function, "__code__", None)
    return code.co_firstlineno if code is not None else 1
