"""Old names of the public API: they work for one release and warn with the new name."""

import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

Target = TypeVar("Target")

REMOVAL = "the old name goes with version 0.3"


def lookup(module: str, name: str, new_names: Mapping[str, str]) -> object:
    """Return what an old name of a module stands for, for the module's `__getattr__`.

    `new_names` maps each old name to `module:name`. Raises AttributeError for any other name.
    """
    if name not in new_names:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    new_module, _, new_name = new_names[name].partition(":")
    message = f"{module}.{name} is now {new_module}.{new_name}"
    warnings.warn(f"{message}; {REMOVAL}", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(new_module), new_name)


def renamed_attribute(old_name: str, new_name: str) -> Any:
    """Return a property that reads an attribute by its old name and warns with the new one."""

    def read(instance: Any) -> Any:
        owner = type(instance).__name__
        message = f"{owner}.{old_name} is now {owner}.{new_name}"
        warnings.warn(f"{message}; {REMOVAL}", DeprecationWarning, stacklevel=2)
        return getattr(instance, new_name)

    return property(read, doc=f"The old name of `{new_name}`.")


def renamed_keywords(**new_names: str) -> Callable[[Target], Target]:
    """Decorate a function or class so that it accepts keywords by their old names and warns."""

    def decorate(target: Any) -> Any:
        is_class = isinstance(target, type)
        function: Callable[..., Any] = vars(target)["__init__"] if is_class else target

        @functools.wraps(function)
        def call(*arguments: Any, **keywords: Any) -> Any:
            for old_name in new_names.keys() & keywords.keys():
                message = f"{target.__name__}({old_name}=) is now {new_names[old_name]}="
                warnings.warn(f"{message}; {REMOVAL}", DeprecationWarning, stacklevel=2)
                keywords[new_names[old_name]] = keywords.pop(old_name)
            return function(*arguments, **keywords)

        if not is_class:
            return call
        target.__init__ = call
        return target

    return decorate
