"""Example programs: those of "Programming TPUs in JAX", and training steps of Drumline's models."""

from __future__ import annotations

from functools import cache

from drumline.chips.names import nearest
from drumline.errors import UserError
from drumline.inspect.examples.chapter import CHAPTER
from drumline.inspect.examples.models import MODELS
from drumline.inspect.examples.program import Example

__all__ = ["Example", "examples", "find_example"]


@cache
def examples() -> dict[str, Example]:
    """Return all examples by name, in the order of the list."""
    return {example.name: example for example in (*CHAPTER, *MODELS)}


def find_example(name: str) -> Example:
    """Return the example with this name.

    Raises:
        UserError: there is none. The message has similar names.
    """
    by_name = examples()
    if name in by_name:
        return by_name[name]
    # Users leave out the folder or type only a part of the name.
    folded = name.strip().casefold()
    containing = [candidate for candidate in by_name if folded and folded in candidate]
    similar = containing[:3] or nearest(name, by_name)
    hint = f"nearest: {', '.join(similar)}" if similar else "drumline inspect --list names them all"
    raise UserError(f"there is no example {name!r}; {hint}")
