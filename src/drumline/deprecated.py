"""Old names of the public API: they work for one release and warn with the new name."""

import importlib
import warnings
from collections.abc import Mapping


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
