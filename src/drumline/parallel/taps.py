"""Intermediate values by name, for whoever wants to see them; to all others they cost nothing.

A model says what it has in hand, `x = tap("norm", x)`, and where in itself it is, `with
scope("blocks.3")`. Unless somebody collects, nothing follows from that, not even in the traced
program. `collecting` yields a dictionary that fills as the model is traced or run:

    def with_intermediates(x):
        with collecting() as seen:
            return model(x), seen

It works under `jax.jit` too, as long as the tap is not within an inner function that is traced by
itself (a scan over layers, a checkpoint): what such a function sees has no value outside of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import jax

_SEEN: ContextVar[dict[str, jax.Array] | None] = ContextVar("seen", default=None)
_PATH: ContextVar[str] = ContextVar("path", default="")
Value = TypeVar("Value", bound=jax.Array)


def tap(name: str, value: Value) -> Value:
    """The value, which is noted under this name within the scopes around it if somebody collects.

    A name that was used already is numbered, so that no value hides another.
    """
    seen = _SEEN.get()
    if seen is not None:
        whole, times = f"{_PATH.get()}{name}", 1
        while (key := whole if times == 1 else f"{whole}#{times}") in seen:
            times += 1
        seen[key] = value
    return value


def look(name: str, make: Callable[[], jax.Array]) -> None:
    """Tap a value that the model itself does not need; it is made only if somebody collects."""
    if _SEEN.get() is not None:
        tap(name, make())


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Names within begin with this one and a dot."""
    token = _PATH.set(f"{_PATH.get()}{name}.")
    try:
        yield
    finally:
        _PATH.reset(token)


@contextmanager
def collecting() -> Iterator[dict[str, jax.Array]]:
    """Values that are tapped meanwhile, by name, in the order in which they came."""
    seen: dict[str, jax.Array] = {}
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)
