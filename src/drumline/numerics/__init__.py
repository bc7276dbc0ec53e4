"""Where JAX, PyTorch and exact arithmetic part ways, and why.

Each name is imported when it is asked for: PyTorch is needed only where something is compared with
it, and JAX takes a second to start.
"""

from importlib import import_module
from typing import Any

_HOMES: dict[str, tuple[str, ...]] = {
    "errors": ("ErrorStatistics", "error_statistics"),
    "mistakes": ("Mistake",),
    "rounding.precision": ("PrecisionReport", "precision"),
    "targets": ("Target", "load_target"),
}
"""Module → the names it gives."""

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    home = next((home for home, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
