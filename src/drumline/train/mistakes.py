"""What went wrong that a user can mend, told in one sentence: what, where, and what to do."""

from importlib.util import find_spec

NEEDED = ("jax", "optax", "orbax", "grain")
"""What training needs: `drumline[jax]` brings it, the base does not."""


class Mistake(ValueError):
    """Its text is the whole sentence. The command line prints it and exits with 2."""


class Unwritable(OSError):
    """A disk that takes no more in the middle of a run. Its text is the whole sentence, too.

    The command line prints it and exits with 1: nothing in the command or the recipe is wrong.
    """


def missing() -> str | None:
    """A sentence on what is not installed and how to install it; None where all is."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if not lacking:
        return None
    return f"training needs {', '.join(lacking)}: pip install 'drumline[jax]'"
