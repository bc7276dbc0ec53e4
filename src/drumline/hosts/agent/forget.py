"""What a host must not keep."""

from __future__ import annotations

from .files import remove
from .wire import say


def forget(folder: str) -> None:
    """Remove the secrets."""
    remove(folder, "secrets.json")
    say({"forgotten": True})
