"""Programs to look at: those of "Programming TPUs in JAX", and our own models' training steps."""

from __future__ import annotations

from functools import cache

from drumline.chips.names import nearest
from drumline.errors import UserError
from drumline.inspect.examples.chapter import CHAPTER
from drumline.inspect.examples.models import MODELS
from drumline.inspect.examples.program import Example

__all__ = ["Example", "example", "examples"]


@cache
def examples() -> dict[str, Example]:
    """Every example by name, in the order to list them."""
    return {one.name: one for one in (*CHAPTER, *MODELS)}


def example(name: str) -> Example:
    """The example of that name.

    Raises:
        UserError: there is none, with the names that look most like it.
    """
    known = examples()
    if name in known:
        return known[name]
    # A user who leaves the folder out, or types a part of the name, means what holds it.
    folded = name.strip().casefold()
    near = [each for each in known if folded and folded in each][:3] or nearest(name, known)
    hint = f"nearest: {', '.join(near)}" if near else "drumline inspect --list names them all"
    raise UserError(f"there is no example {name!r}; {hint}")
