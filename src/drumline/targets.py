"""`MODULE:FUNCTION`, as a user writes it: the function it names, and what to call it with.

MODULE is a file (`sampler.py`) or a dotted name that can be imported from the current folder. A
function that takes arguments needs some to be run with: those that the module's own `inputs()`
returns, as a tuple, or another function of that module that the user names.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from drumline import deprecated
from drumline.errors import UserError

INPUTS = "inputs"
"""The function of a module that makes the arguments, where no other is named."""


@dataclass(frozen=True)
class Target:
    """A function, and the arguments to run it with."""

    name: str
    """As the user wrote it."""
    function: Callable[..., Any]
    inputs: tuple[Any, ...]


def load_function(given: str) -> Callable[..., Any]:
    """The function that `MODULE:FUNCTION` names.

    Raises:
        UserError: there is no such module or function.
    """
    return _named(given)[1]


def _named(given: str) -> tuple[ModuleType, Callable[..., Any], str]:
    where, colon, name = given.rpartition(":")
    if not colon or not where or not name:
        raise UserError(f"{given}: write it as MODULE:FUNCTION, such as sampler.py:step")
    module = _module(where)
    return module, _function(module, where, name), where


def load_target(given: str, inputs: str | None = None, *, hint: str = "") -> Target:
    """The function that `MODULE:FUNCTION` names; `inputs` names the one that makes its arguments.

    Args:
        given: as the user wrote it.
        inputs: the name of the function of that module that makes the arguments.
        hint: how else the command takes arguments.

    Raises:
        UserError: there is no such module or function, or its arguments are nowhere to be found.
    """
    module, function, where = _named(given)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    takes = [p.name for p in parameters if p.default is p.empty and p.kind not in _MANY]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters) and hasattr(module, INPUTS)
    if inputs is None and not takes and not takes_any:
        return Target(given, function, ())
    if inputs is None and not hasattr(module, INPUTS):
        raise UserError(
            f"{given} takes {', '.join(takes)}: {hint and f'give {hint}, '}define {INPUTS}() in "
            f"{where}, which returns them as a tuple, or name another function there with --inputs"
        )
    name = inputs or INPUTS
    make = _function(module, where, name)
    try:
        made = make()
    except Exception as wrong:  # whatever the user's code raises
        raise UserError(f"{where}:{name}() fails: {_told(wrong)}") from wrong
    return Target(given, function, tuple(made) if isinstance(made, tuple | list) else (made,))


_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _module(where: str) -> ModuleType:
    if where.endswith(".py") or "/" in where:
        return _file(Path(where))
    # As `python -m` does: what lies in the current folder can be imported.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if where.startswith("."):
        raise UserError(f"{where}: write the module's whole name, or the file's path with .py")
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as missing:
        if missing.name is not None and f"{where}.".startswith(f"{missing.name}."):
            raise UserError(
                f"{where}: there is no such module here; a file is named with its path and .py"
            ) from None
        raise UserError(_why_not(where, missing)) from None
    except (Exception, SystemExit) as wrong:  # whatever the user's code raises
        raise UserError(_why_not(where, wrong)) from wrong


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    # Not under a name that stands for something else already: a user's file may be called json.py.
    name = path.stem if path.stem not in sys.modules else f"target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # As Python does for a script: what lies beside it can be imported, and finds it by name.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as wrong:  # whatever the user's code raises
        del sys.modules[name]
        raise UserError(_why_not(str(path), wrong)) from wrong
    return module


def _why_not(where: str, wrong: BaseException) -> str:
    """Why a module cannot be imported."""
    if isinstance(wrong, ModuleNotFoundError):
        return f"{where} imports {wrong.name}, which is not installed"
    if isinstance(wrong, SyntaxError) and wrong.filename:
        return f"{wrong.filename}:{wrong.lineno}: {wrong.msg}"
    if isinstance(wrong, SystemExit):
        return f"{where} leaves when it is imported; guard that with if __name__ == '__main__'"
    return f"{where} cannot be imported: {_told(wrong)}"


def _told(wrong: BaseException) -> str:
    """An exception of the user's code in one line, with the place that raised it."""
    raised = traceback.extract_tb(wrong.__traceback__)[-1:]
    place = f" at {raised[0].filename}:{raised[0].lineno}" if raised else ""
    said = (str(wrong).splitlines() or [""])[0]
    return f"{type(wrong).__name__}: {said}{place}"


def _function(module: ModuleType, where: str, name: str) -> Callable[..., Any]:
    found = getattr(module, name, None)
    if callable(found):
        return found  # type: ignore[no-any-return]
    if found is not None:
        raise UserError(f"{where}:{name} is no function")
    own = [
        other
        for other, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    listed = f"; it has {', '.join(own)}" if own else ""
    raise UserError(f"{where} has no {name}{listed}")


def __getattr__(name: str) -> Any:
    return deprecated.lookup(__name__, name, {"Mistake": "drumline.errors:UserError"})
