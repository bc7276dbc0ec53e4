"""The schema of the job database and its migrations, which upgrade a home in place.

`PRAGMA user_version` is the number of migrations that a file has had. A migration and its number
are saved in one transaction, so a server that is killed in between leaves the file unchanged.
Released migrations never change. A change of the schema is a new migration at the end.
"""

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SchemaError(Exception):
    """The file cannot be used. The text has the reason and the fix."""


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Write all changes of the block, or none."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        # After an error at the commit (a full disk), SQLite may have rolled back by itself.
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def upgrade(db: sqlite3.Connection) -> None:
    """Apply the migrations that a file has not had."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > len(_MIGRATIONS):
        raise SchemaError(
            f"jobs.db was written by a newer drumline (its schema is {version}, this one knows"
            f" {len(_MIGRATIONS)}); install that version again"
        )
    for number, migrate in enumerate(_MIGRATIONS[version:], start=version + 1):
        with transaction(db):
            # Another process may have applied the migration before the transaction began.
            (version,) = db.execute("PRAGMA user_version").fetchone()
            if version < number:
                migrate(db)
                db.execute(f"PRAGMA user_version = {number}")


def _create_tables(db: sqlite3.Connection) -> None:
    """Create the tables of the time before migrations. Some files have some of them already."""
    for statement in _FIRST_TABLES.split(";"):
        db.execute(statement)
    if "course" not in {row[1] for row in db.execute("PRAGMA table_info(attempts)")}:
        db.execute("ALTER TABLE attempts ADD COLUMN course TEXT")


_FIRST_TABLES = """
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


def _add_search_columns(db: sqlite3.Connection) -> None:
    """Add columns for the start of the server and the filters of `list`, copied from the state.

    A row whose state is not JSON stays `live`, so that the next start reads it and reports it.
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
    # This index has all columns of a search, because rows are long and slow to read.
    db.execute(
        "CREATE INDEX searched_jobs ON jobs (live, number, status, ended, user, name, trouble)"
    )
    db.execute("CREATE INDEX unreadable_jobs ON jobs (number) WHERE trouble IS NOT NULL")
    db.execute(
        "CREATE INDEX slices_to_go ON slices (released) WHERE released IS NOT NULL AND gone IS NULL"
    )
    db.execute("CREATE INDEX slices_of_zone ON slices (zone)")


def _rename_placement(db: sqlite3.Connection) -> None:
    """Rename a job's `slice` to `placement`, and its phase `waiting` to `queued`."""
    db.execute(
        "UPDATE jobs SET state = json_remove("
        "json_set(state, '$.placement', json_extract(state, '$.slice')), '$.slice')"
        " WHERE json_valid(state) AND json_type(state, '$.slice') IS NOT NULL"
    )
    db.execute(
        "UPDATE jobs SET state = json_set(state, '$.placement.phase', 'queued')"
        " WHERE json_valid(state) AND state ->> '$.placement.phase' = 'waiting'"
    )


def _create_hosts(db: sqlite3.Connection) -> None:
    """Create the table of hosts, by their most specific names."""
    db.execute(
        "CREATE TABLE hosts (identity TEXT PRIMARY KEY, last REAL NOT NULL, record TEXT NOT NULL)"
        " STRICT"
    )


def _add_program_of_slice(db: sqlite3.Connection) -> None:
    """Add what is known of the program on a slice that is being deleted."""
    db.execute("ALTER TABLE slices ADD COLUMN program TEXT NOT NULL DEFAULT ''")


_ROLES = {"asking": "requested", "queued": "requested", "booting": "starting", "ready": "active"}


def _list_placements(db: sqlite3.Connection) -> None:
    """Replace a job's `placement` and `parked` by a list of placements with roles."""
    rows = db.execute(
        "SELECT number, state FROM jobs WHERE json_valid(state)"
        " AND (json_type(state, '$.placement') = 'object' OR state ->> '$.parked' != '[]')"
    ).fetchall()
    for number, text in rows:
        state = json.loads(text)
        placement, held_back = state.pop("placement", None), state.pop("parked", [])
        placements = [{**one, "role": "held back"} for one in held_back]
        if placement is not None:
            phase = placement.get("phase", "asking")
            accepted_at = placement.get("accepted_at")
            if accepted_at is None and phase != "asking":
                accepted_at = placement["asked_at"]
            role = _ROLES.get(phase, phase)
            placements.insert(0, {**placement, "role": role, "accepted_at": accepted_at})
        for one in placements:
            one.pop("phase", None)
        state = json.dumps({**state, "placements": placements})
        db.execute("UPDATE jobs SET state = ? WHERE number = ?", (state, number))


def _create_zone_events(db: sqlite3.Connection) -> None:
    """Create the table of grants, refusals and losses in each zone."""
    db.execute(
        "CREATE TABLE zone_events (id INTEGER PRIMARY KEY, accelerator TEXT NOT NULL,"
        " zone TEXT NOT NULL, time REAL NOT NULL, kind TEXT NOT NULL, seconds REAL NOT NULL) STRICT"
    )
    db.execute("CREATE INDEX events_of_zone ON zone_events (accelerator, zone)")


def _add_fields_of_events(db: sqlite3.Connection) -> None:
    """Add the facts of an event as JSON."""
    db.execute("ALTER TABLE events ADD COLUMN fields TEXT NOT NULL DEFAULT '{}'")


_MIGRATIONS: tuple[Callable[[sqlite3.Connection], None], ...] = (
    _create_tables,
    _add_search_columns,
    _rename_placement,
    _create_hosts,
    _add_program_of_slice,
    _list_placements,
    _create_zone_events,
    _add_fields_of_events,
)
