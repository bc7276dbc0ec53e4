"""Taps: names for intermediate values of a model. They cost nothing unless they are collected.

A model names a value with `x = tap("norm", x)`, and a part of itself with `with scope("blocks.3")`.
Without `collecting`, neither changes the traced program. `collecting` yields a dictionary that is
filled while the model is traced or run:

    def with_intermediates(x):
        with collecting() as values:
            return model(x), values

This works under `jax.jit` as well, except for taps inside functions that are traced separately (a
scan over layers, a checkpoint): their values cannot be used outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax

_VALUES: ContextVar[dict[str, jax.Array] | None] = ContextVar("values", default=None)
_PATH: ContextVar[str] = ContextVar("path", default="")
Value = TypeVar("Value", bound=jax.Array)


def tap(name: str, value: Value) -> Value:
    """Return the value, and collect it under this name within the current scopes.

    A name that occurs again gets a number, so that no value replaces another.
    """
    values = _VALUES.get()
    if values is not None:
        path, count = f"{_PATH.get()}{name}", 1
        while (key := path if count == 1 else f"{path}#{count}") in values:
            count += 1
        values[key] = value
    return value


def tap_lazy(name: str, compute: Callable[[], jax.Array]) -> None:
    """Tap a value that the model itself does not need. Compute it only if it is collected."""
    if _VALUES.get() is not None:
        tap(name, compute())


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Prefix the names of taps inside with this name and a dot."""
    token = _PATH.set(f"{_PATH.get()}{name}.")
    try:
        yield
    finally:
        _PATH.reset(token)


@contextmanager
def collecting() -> Iterator[dict[str, jax.Array]]:
    """Collect the values of taps by name, in the order of the taps."""
    values: dict[str, jax.Array] = {}
    token = _VALUES.set(values)
    try:
        yield values
    finally:
        _VALUES.reset(token)
