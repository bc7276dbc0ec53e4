"""Load the function that a user names as `MODULE:FUNCTION`, and its arguments.

MODULE is a file (`sampler.py`) or a dotted name that can be imported from the current folder. The
arguments come from the module's own `inputs()`, which returns a tuple, or from another function of
the module that the user names.
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
"""The function that returns the arguments, unless the user names another."""
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Target:
    """A function, and the arguments to call it with."""

    name: str
    """`MODULE:FUNCTION`, as the user wrote it."""
    function: Callable[..., Any]
    inputs: tuple[Any, ...]


@deprecated.renamed_keywords(given="name")
def load_function(name: str) -> Callable[..., Any]:
    """Load the function that `MODULE:FUNCTION` names.

    Raises:
        UserError: there is no such module or function.
    """
    return _load_named(name)[1]


@deprecated.renamed_keywords(given="name")
def load_target(name: str, inputs: str | None = None, *, hint: str = "") -> Target:
    """Load the function that `MODULE:FUNCTION` names, and its arguments.

    Args:
        name: `MODULE:FUNCTION`.
        inputs: the name of the function in that module that returns the arguments.
        hint: for the error message, another way in which the command accepts arguments.

    Raises:
        UserError: there is no such module or function, or no arguments.
    """
    module, function, module_name = _load_named(name)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    required = [p.name for p in parameters if p.default is p.empty and p.kind not in _VARIADIC]
    is_variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if inputs is None and not required and not (is_variadic and hasattr(module, INPUTS)):
        return Target(name, function, ())
    if inputs is None and not hasattr(module, INPUTS):
        raise UserError(
            f"{name} takes {', '.join(required)}: {hint and f'give {hint}, '}define {INPUTS}() in "
            f"{module_name}, which returns them as a tuple, or name another function there with "
            "--inputs"
        )
    inputs = inputs or INPUTS
    make_inputs = _get_function(module, module_name, inputs)
    try:
        arguments = make_inputs()
    except Exception as error:  # whatever the user's code raises
        raise UserError(f"{module_name}:{inputs}() fails: {_describe_error(error)}") from error
    is_sequence = isinstance(arguments, tuple | list)
    return Target(name, function, tuple(arguments) if is_sequence else (arguments,))


def _load_named(name: str) -> tuple[ModuleType, Callable[..., Any], str]:
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise UserError(f"{name}: write it as MODULE:FUNCTION, such as sampler.py:step")
    module = _load_module(module_name)
    return module, _get_function(module, module_name, function_name), module_name


def _load_module(name: str) -> ModuleType:
    if name.endswith(".py") or "/" in name:
        return _load_file(Path(name))
    # As with `python -m`, modules in the current folder can be imported.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    if name.startswith("."):
        raise UserError(f"{name}: write the module's full name, or the file's path with .py")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise UserError(
                f"{name}: there is no such module here; a file is named with its path and .py"
            ) from None
        raise UserError(_import_message(name, error)) from None
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        raise UserError(_import_message(name, error)) from error


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"{path}: there is no such file")
    # Do not replace a loaded module: a user's file may be called json.py.
    name = path.stem if path.stem not in sys.modules else f"target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # As for a script, other modules in its folder can be imported.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the user's code raises
        del sys.modules[name]
        raise UserError(_import_message(str(path), error)) from error
    return module


def _import_message(module_name: str, error: BaseException) -> str:
    """Return a message for a module that cannot be imported."""
    if isinstance(error, ModuleNotFoundError):
        return f"{module_name} imports {error.name}, which is not installed"
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {error.msg}"
    if isinstance(error, SystemExit):
        return f"{module_name} exits when it is imported; guard that with if __name__ == '__main__'"
    return f"{module_name} cannot be imported: {_describe_error(error)}"


def _describe_error(error: BaseException) -> str:
    """Describe an exception of the user's code in one line, with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    source = f" at {frames[0].filename}:{frames[0].lineno}" if frames else ""
    message = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {message}{source}"


def _get_function(module: ModuleType, module_name: str, name: str) -> Callable[..., Any]:
    value = getattr(module, name, None)
    if callable(value):
        return value  # type: ignore[no-any-return]
    if value is not None:
        raise UserError(f"{module_name}:{name} is not a function")
    functions = [
        other
        for other, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    hint = f"; it has {', '.join(functions)}" if functions else ""
    raise UserError(f"{module_name} has no {name}{hint}")


def __getattr__(name: str) -> Any:
    return deprecated.lookup(__name__, name, {"Mistake": "drumline.errors:UserError"})
