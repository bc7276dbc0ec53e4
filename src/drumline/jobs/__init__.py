"""Jobs: request slices, and keep programs running on them.

Python users start with `from drumline.jobs import Client`. The client is loaded on first use, so
that importing one module of this package does not load the others.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from drumline.jobs.client import Client, LargeCode, Refused

__all__ = ["Client", "LargeCode", "Refused"]


def __getattr__(name: str) -> object:
    """Load the client on first use."""
    if name in __all__:
        from drumline.jobs import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, also those that are not loaded yet, for tab completion."""
    return sorted({*globals(), *__all__})
