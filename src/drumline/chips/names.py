"""How a name a user typed is held against the names there are."""

import difflib
from collections.abc import Iterable


class UnknownName(ValueError):
    """A name that means nothing here. Its text is the whole sentence for the user."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """The known names that look most like `name`, best first."""
    by_folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)
    return [by_folded[folded] for folded in close]
