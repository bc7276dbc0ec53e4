"""Errors and suggestions for names that a user typed."""

import difflib
from collections.abc import Iterable

from drumline.errors import UserError


class UnknownName(UserError):
    """A chip, slice, zone or tier does not exist. The message is a sentence for the user."""


def nearest(name: str, candidates: Iterable[str], count: int = 3) -> list[str]:
    """Return the candidates most similar to `name`, by descending similarity."""
    by_folded = {candidate.casefold(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.casefold(), by_folded, n=count, cutoff=0.5)
    return [by_folded[folded] for folded in matches]
