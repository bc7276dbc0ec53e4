"""Which jobs to list: the user's filters as a term of SQL, so that history costs a list nothing."""

from dataclasses import dataclass

UNREADABLE = "UNREADABLE"
"""The status under which a job is listed whose row cannot be read."""
MOST_ENDED = 1000
"""The most ended jobs in a list without a limit: enough for any screen."""


@dataclass(frozen=True)
class Search:
    """The filters of a list; those that are None or empty do not apply."""

    since: float | None = None
    """Leave out jobs that had ended before this."""
    status: tuple[str, ...] = ()
    name: str | None = None
    """A part of the name, or a pattern with * and ?."""
    user: str | None = None
    limit: int | None = None
    """How many of the newest; None is all that have not ended and the newest MOST_ENDED others."""
    before: str | None = None
    """List only jobs older than this one, for the next page."""

    @property
    def paged(self) -> bool:
        """Whether the list is cut after a number of jobs, running ones included."""
        return self.limit is not None or self.before is not None


def where(search: Search) -> tuple[str, list[object]]:
    """The SQL term for the rows of `jobs`, and the values for its question marks."""
    terms: list[str] = ["1"]
    given: list[object] = []
    if search.since is not None:
        terms.append("(live = 1 OR trouble IS NOT NULL OR ended > ?)")
        given.append(search.since)
    if search.status:
        marks = ", ".join("?" * len(search.status))
        shown = f"CASE WHEN trouble IS NULL THEN status ELSE '{UNREADABLE}' END"
        terms.append(f"{shown} IN ({marks})")
        given += search.status
    if search.name is not None:
        pattern = search.name if set(search.name) & set("*?") else f"*{search.name}*"
        terms.append("name GLOB ?")
        # GLOB has sets of characters too; here a bracket is only a bracket.
        given.append(pattern.replace("[", "[[]"))
    if search.user is not None:
        terms.append("user = ?")
        given.append(search.user)
    if search.before is not None:
        terms.append("number < ?")
        given.append(int(search.before))
    return " AND ".join(terms), given
