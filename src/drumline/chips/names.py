"""Compares a name that a user typed with the known names."""

import difflib
from collections.abc import Iterable


class UnknownName(ValueError):
    """A name is not known. The text is the whole sentence for the user."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that look most like `name`, best first."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)
    return [by_folded[folded] for folded in close]
