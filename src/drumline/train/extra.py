"""Whether what training needs is installed: `drumline[jax]` brings it, the base does not."""

from importlib.util import find_spec

NEEDED = ("jax", "optax", "orbax", "grain")


def missing() -> str | None:
    """A sentence on what is not there and how to install it; None where all is."""
    lacking = [name for name in NEEDED if find_spec(name) is None]
    if not lacking:
        return None
    return f"training needs {', '.join(lacking)}: pip install 'drumline[jax]'"
