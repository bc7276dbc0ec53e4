"""Old names of the public API: they work for one release and warn with the new name."""

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


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


def renamed_field(old: str, new: str) -> Any:
    """Return a property under which the old name of a field or property still works."""

    def read(instance: object) -> Any:
        owner = type(instance).__name__
        message = f"{owner}.{old} is now {owner}.{new}; the old name goes with version 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(instance, new)

    return property(read, doc=f"The old name of `{new}`.")


def renamed_parameters(**new_names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make the old names of keyword parameters work, given as `old="new"`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
            for old, new in new_names.items():
                if old in kwargs:
                    message = f"the parameter {old} of {function.__name__} is now {new}; "
                    message += "the old name goes with version 0.3"
                    warnings.warn(message, DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate
