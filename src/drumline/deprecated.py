"""Old names of the public API: they work for one release and warn with the new name."""

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")


def lookup(module: str, name: str, new_names: Mapping[str, str]) -> object:
    """Return what an old name of a module stands for, for the module's `__getattr__`.

    `new_names` maps each old name to `module:name`. Raises AttributeError for any other name.
    """
    if name not in new_names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new_module, _, new_name = new_names[name].partition(":")
    message = f"{module}.{name} is now {new_module}.{new_name}; the old name goes with version 0.3"
    warnings.warn(message, DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(new_module), new_name)


def renamed_arguments(
    **new_names: str,
) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Decorate a function that still accepts the old names of some keyword arguments.

    Each keyword is an old name, and its value the new one.
    """

    def decorate(function: Callable[Params, Result]) -> Callable[Params, Result]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Result:
            for old, new in new_names.items():
                if old in kwargs:
                    message = (
                        f"{function.__name__}: the argument {old} is now {new}; the old name goes "
                        "with version 0.3"
                    )
                    warnings.warn(message, DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
