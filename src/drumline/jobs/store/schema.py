"""The tables of the job database, by numbered steps: each home is brought up to date in place.

`PRAGMA user_version` says how many steps a file has had. A step runs in one transaction together
with its number, so a server that is killed in the middle finds the file as it was before. Steps
that were released are never changed; a change of the schema is a new step at the end.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SchemaError(Exception):
    """The file cannot be used; the text says why and what to do."""


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """All of the block is written, or nothing."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # A full disk may raise at the commit, and SQLite may have rolled back by itself.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def upgrade(db: sqlite3.Connection) -> None:
    """Apply the steps that a file has not had."""
    (known,) = db.execute("PRAGMA user_version").fetchone()
    if known > len(_STEPS):
        raise SchemaError(
            f"jobs.db was written by a newer drumline (its schema is {known}, this one knows"
            f" {len(_STEPS)}); install that version again"
        )
    for number, step in enumerate(_STEPS[known:], start=known + 1):
        with transaction(db):
            # Asked again, now that nobody else can take the step meanwhile.
            (taken,) = db.execute("PRAGMA user_version").fetchone()
            if taken < number:
                step(db)
                db.execute(f"PRAGMA user_version = {number}")


def _first(db: sqlite3.Connection) -> None:
    """The tables as they were before steps were counted: some files have them, or most of them."""
    for statement in _FIRST.split(";"):
        db.execute(statement)
    if "course" not in {row[1] for row in db.execute("PRAGMA table_info(attempts)")}:
        db.execute("ALTER TABLE attempts ADD COLUMN course TEXT")


_FIRST = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    user TEXT NOT NULL, name TEXT NOT NULL, spec TEXT NOT NULL, state TEXT NOT NULL,
    progress TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS attempts (
    job TEXT NOT NULL, number INTEGER NOT NULL,
    zone TEXT, accelerator TEXT, started REAL NOT NULL, running REAL, ended REAL,
    outcome TEXT, detail TEXT NOT NULL DEFAULT '', hosts TEXT NOT NULL DEFAULT '[]',
    course TEXT,
    PRIMARY KEY (job, number)
) STRICT;
CREATE TABLE IF NOT EXISTS slices (
    name TEXT PRIMARY KEY, job TEXT NOT NULL, zone TEXT NOT NULL, accelerator TEXT NOT NULL,
    asked REAL NOT NULL, ready REAL, released REAL, gone REAL
) STRICT;
CREATE TABLE IF NOT EXISTS events (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    job TEXT NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS points (
    id INTEGER PRIMARY KEY, job TEXT NOT NULL, attempt INTEGER NOT NULL,
    time REAL NOT NULL, step REAL NOT NULL, metrics TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS points_of_job ON points (job, id);
CREATE INDEX IF NOT EXISTS events_of_job ON events (job, id);
CREATE INDEX IF NOT EXISTS slices_of_job ON slices (job)
"""


def _what_is_searched_for(db: sqlite3.Connection) -> None:
    """Columns for what the server starts with and what `list` filters by, out of the state.

    A row whose state is no JSON stays `live`, so that the next start reads it and says why not.
    """
    for column in (
        "status TEXT NOT NULL DEFAULT ''",
        "ended REAL",
        "live INTEGER NOT NULL DEFAULT 1",
        "trouble TEXT",
    ):
        db.execute(f"ALTER TABLE jobs ADD COLUMN {column}")
    db.execute(
        "UPDATE jobs SET status = CAST(coalesce(state ->> '$.status', '') AS TEXT),"
        " ended = CAST(state ->> '$.ended_at' AS REAL),"
        " live = coalesce(state ->> '$.status', '') NOT IN ('SUCCEEDED', 'FAILED', 'CANCELLED')"
        " OR state ->> '$.slice' IS NOT NULL"
        " WHERE json_valid(state)"
    )
    # All that a search needs: rows are long, and a list would have to read each of them.
    db.execute(
        "CREATE INDEX searched_jobs ON jobs (live, number, status, ended, user, name, trouble)"
    )
    db.execute("CREATE INDEX unreadable_jobs ON jobs (number) WHERE trouble IS NOT NULL")
    db.execute(
        "CREATE INDEX slices_to_go ON slices (released) WHERE released IS NOT NULL AND gone IS NULL"
    )
    db.execute("CREATE INDEX slices_of_zone ON slices (zone)")


def _placements(db: sqlite3.Connection) -> None:
    """What a job holds is now called its placement, and a waiting placement is queued."""
    db.execute(
        "UPDATE jobs SET state = json_remove("
        "json_set(state, '$.placement', json_extract(state, '$.slice')), '$.slice')"
        " WHERE json_valid(state) AND json_type(state, '$.slice') IS NOT NULL"
    )
    db.execute(
        "UPDATE jobs SET state = json_set(state, '$.placement.phase', 'queued')"
        " WHERE json_valid(state) AND state ->> '$.placement.phase' = 'waiting'"
    )


def _hosts(db: sqlite3.Connection) -> None:
    """Hosts that jobs have met, by their strongest names."""
    db.execute(
        "CREATE TABLE hosts (identity TEXT PRIMARY KEY, last REAL NOT NULL, record TEXT NOT NULL)"
        " STRICT"
    )


_STEPS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    _first,
    _what_is_searched_for,
    _placements,
    _hosts,
)
