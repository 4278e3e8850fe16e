"""A user's own function, named in the configuration as ``module:function`` or ``file.py:function``."""

import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from rolecall.errors import UserError, nearest


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that ``spec`` names; ``key`` is the configuration key, for messages.

    Raises:
        UserError: not written ``module:function``, no such module, file or function, or importing it fails.
    """
    source, colon, name = spec.rpartition(":")
    if not colon or not source or not name.isidentifier():
        raise UserError(f"{key} = {spec!r} must be written module:function or file.py:function.")
    module = _load_file(source, key) if source.endswith(".py") else _load_module(source, key)
    function = getattr(module, name, None)
    if not callable(function):
        known = [item for item, value in vars(module).items() if callable(value) and not item.startswith("_")]
        raise UserError(f"{key} = {spec!r}: {source} has no function {name!r}.{nearest(name, known)}")
    return function


def describe(error: BaseException, file: str | None = None) -> str:
    """``ValueError: the message (rewards.py, line 12)``: the deepest line in ``file``, else the deepest line."""
    every = list(traceback.extract_tb(error.__traceback__))
    frames = [frame for frame in every if frame.filename == file] or every
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def _load_file(source: str, key: str) -> ModuleType:
    file = Path(source).resolve()
    if not file.is_file():
        raise UserError(f"{key}: there is no file {source!r}.")
    _importable(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"rolecall_user_{file.stem}", file)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickle look for it
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}: importing {source} failed: {describe(error, str(file))}") from error
    return module


def _load_module(source: str, key: str) -> ModuleType:
    _importable(os.getcwd())
    try:
        return importlib.import_module(source)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{key}: importing the module {source!r} failed: {describe(error)}. "
            "A file is named by its path instead: path/to/file.py:function."
        ) from error


def _importable(folder: str) -> None:
    if folder not in sys.path:
        sys.path.append(folder)
