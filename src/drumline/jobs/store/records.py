"""Jobs, attempts, slices and events on disk: one SQLite file that survives any crash of the server.

WAL with synchronous=FULL: what a caller was answered is on disk. Each decision is saved in one
transaction, before it is acted on.
"""

import json
import logging
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from drumline.jobs.core.host_history import KnownHost
from drumline.jobs.core.state import Attempt, Decision, EffectKind, Event, Job, Placement
from drumline.jobs.store.metrics import Metrics
from drumline.jobs.store.schema import transaction, upgrade
from drumline.jobs.store.specs import StoredSpec
from drumline.observed import HostReport

_JOB = TypeAdapter(Job)


@dataclass(frozen=True)
class Record:
    """A job with what the user gave for it."""

    job: Job
    user: str
    name: str
    spec: StoredSpec


@dataclass(frozen=True)
class SetAside:
    """A job whose row cannot be read. Nothing is done about it until the user decides."""

    id: str
    user: str
    name: str
    reason: str


class Unreadable(Exception):
    """A job's row cannot be read; the text is why."""

    def __init__(self, aside: SetAside) -> None:
        """Keep what is known of the job nevertheless."""
        super().__init__(aside.reason)
        self.aside = aside


@dataclass(frozen=True)
class SliceRow:
    """A slice that was ever requested; it cost money from `ready` to `gone`."""

    name: str
    job: str
    zone: str
    accelerator: str
    asked: float
    ready: float | None
    released: float | None
    gone: float | None


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


log = logging.getLogger(__name__)

_KNOWN = TypeAdapter(KnownHost)


class HostRows:
    """One row for each host."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """The table is in this database."""
        self._db = db

    def all(self) -> dict[str, KnownHost]:
        """Every host by its identity; a row that cannot be read is left where it is."""
        found = {}
        for row in self._db.execute("SELECT identity, record FROM hosts ORDER BY identity"):
            try:
                found[row["identity"]] = _KNOWN.validate_json(row["record"])
            except ValidationError as wrong:
                log.warning("the row of host %s cannot be read: %s", row["identity"], wrong)
        return found

    def save(self, known: KnownHost) -> None:
        """Save a host, whether it is new or not."""
        self._db.execute(
            "INSERT INTO hosts VALUES (?, ?, ?) ON CONFLICT (identity)"
            " DO UPDATE SET last = excluded.last, record = excluded.record",
            (known.name.identity, known.last_seen, _KNOWN.dump_json(known).decode()),
        )

    def remove(self, identity: str) -> None:
        """Forget a host."""
        self._db.execute("DELETE FROM hosts WHERE identity = ?", (identity,))


class Store:
    """The database. Used from one thread; each method is one transaction."""

    def __init__(self, path: Path) -> None:
        """Open the file, or create it."""
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        upgrade(self._db)
        self.metrics = Metrics(self._db)
        self.hosts = HostRows(self._db)
        self._releasing: list[SliceRow] = []
        self._releasing_at = -1
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (secrets.token_hex(4),))
        row = self._db.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
        self.owner = str(row["value"])
        """The id of this server among all that share a project: eight characters, never changed."""

    def next_fence(self) -> int:
        """The fencing number of a new attempt, greater than all before."""
        row = self._db.execute(
            "INSERT INTO meta VALUES ('fence', '1') ON CONFLICT (key) DO UPDATE"
            " SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT) RETURNING value"
        ).fetchone()
        return int(row["value"])

    def skip_fence_to(self, number: int) -> None:
        """Give the next attempt a fencing number above this one."""
        if number:
            self._db.execute(
                "INSERT INTO meta VALUES ('fence', :number) ON CONFLICT (key) DO UPDATE"
                " SET value = :number WHERE CAST(value AS INTEGER) < CAST(:number AS INTEGER)",
                {"number": str(number)},
            )

    def check_writable(self) -> None:
        """Write something that changes nothing; raises where the disk is full."""
        self._db.execute("UPDATE meta SET value = value WHERE key = 'owner'")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add(
        self, user: str, name: str, spec: Mapping[str, Any], make: Callable[[str], Job]
    ) -> Record:
        """Save a new job under the next free id, which `make` puts into its state."""
        kept = StoredSpec.of(spec)
        with transaction(self._db):
            row = self._db.execute(
                "INSERT INTO jobs (user, name, spec, state) VALUES (?, ?, ?, '') RETURNING number",
                (user, name, json.dumps(spec)),
            ).fetchone()
            job = make(f"{row['number']:06}")
            self._write_state(job, job.created_at)
            self._write_events(job, (Event("created", name),), job.created_at)
        return Record(job, user, name, kept)

    def living(self) -> list[Record]:
        """Every job that has not ended or still holds a slice, oldest first.

        A row that cannot be read is set aside with the reason. The next start tries it again: what
        a newer version wrote, that version can read.
        """
        rows = self._db.execute("SELECT * FROM jobs WHERE live = 1 ORDER BY number").fetchall()
        found = []
        for row in rows:
            with suppress(Unreadable):
                found.append(self._record(row))
        return found

    def record(self, job_id: str) -> Record | None:
        """A job; None where there is none of that id. Raises Unreadable."""
        query = "SELECT * FROM jobs WHERE number = ?"
        row = self._db.execute(query, (int(job_id),)).fetchone()
        return self._record(row) if row else None

    def _record(self, row: sqlite3.Row) -> Record:
        try:
            job = _JOB.validate_json(row["state"])
            spec = StoredSpec.of(json.loads(row["spec"]))
        except (ValueError, RecursionError) as wrong:
            aside = _aside(row, _why_unreadable(wrong))
            self._mark(row, aside.reason)
            raise Unreadable(aside) from None
        self._mark(row, None)
        return Record(job, row["user"], row["name"], spec)

    def _mark(self, row: sqlite3.Row, trouble: str | None) -> None:
        if row["trouble"] != trouble:
            query = "UPDATE jobs SET trouble = ? WHERE number = ?"
            # On a full disk this is saved when the row is next read.
            with suppress(sqlite3.OperationalError):
                self._db.execute(query, (trouble, row["number"]))

    def set_aside(self) -> list[SetAside]:
        """Jobs whose rows cannot be read."""
        rows = self._db.execute("SELECT * FROM jobs WHERE trouble IS NOT NULL ORDER BY number")
        return [_aside(row, row["trouble"]) for row in rows]

    def last_number(self) -> int:
        """The highest number that a job was ever given."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
        return int(row["seq"]) if row else 0

    def skip_to(self, number: int) -> None:
        """Give the next job a number above this one."""
        if number > self.last_number():
            with transaction(self._db):
                self._db.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
                self._db.execute("INSERT INTO sqlite_sequence VALUES ('jobs', ?)", (number,))

    def count(self) -> int:
        """How many jobs there are, of any age."""
        return int(self._db.execute("SELECT count(*) FROM jobs").fetchone()[0])

    def find(self, search: Search) -> list[str]:
        """The ids of the jobs that match, oldest first."""
        term, given = where(search)
        if search.paged:
            found = self._numbers(term, given, search.limit or MOST_ENDED)
        else:
            found = self._numbers(f"{term} AND live = 1", given, None)
            found += self._numbers(f"{term} AND live = 0", given, MOST_ENDED)
        return [f"{number:06}" for number in sorted(found)]

    def _numbers(self, term: str, given: list[object], limit: int | None) -> list[int]:
        # The term consists of question marks and columns, of nothing that a user typed.
        query = f"SELECT number FROM jobs WHERE {term} ORDER BY number DESC LIMIT ?"  # noqa: S608
        rows = self._db.execute(query, (*given, -1 if limit is None else limit))
        return [row["number"] for row in rows]

    def save(
        self,
        decision: Decision,
        now: float,
        reports: Iterable[HostReport] = (),
        spec: StoredSpec | None = None,
    ) -> None:
        """Save a decision, and the last reports of the hosts of an attempt that ended.

        A `spec` replaces what the user gave for the job.
        """
        job = decision.job
        hosts = json.dumps([_host(report) for report in reports])
        with transaction(self._db):
            self._write_state(job, now)
            if spec is not None:
                self._db.execute(
                    "UPDATE jobs SET spec = ?, name = coalesce(?, name) WHERE number = ?",
                    (json.dumps(spec.given), spec.name, int(job.id)),
                )
            self._write_events(job, decision.events, now)
            for ended in decision.ended:
                self._write_attempt(job, ended.attempt, now)
                self._db.execute(
                    "UPDATE attempts SET ended = ?, outcome = ?, detail = ?, hosts = ?"
                    " WHERE job = ? AND number = ?",
                    (
                        now, ended.outcome.value, ended.detail, hosts,
                        job.id, ended.attempt.number,
                    ),
                )  # fmt: skip
            if job.attempt is not None:
                self._write_attempt(job, job.attempt, now)
            if job.placement is not None:
                self._write_slice(job.id, job.placement, now)
            for effect in decision.effects:
                if effect.kind is EffectKind.RELEASE:
                    self._write_slice(job.id, effect.placement, now)
                    self._db.execute(
                        "UPDATE slices SET released = ? WHERE name = ? AND released IS NULL",
                        (now, effect.placement.name),
                    )

    def note(self, job_id: str, event: Event, now: float) -> None:
        """Add a line to a job's history."""
        self._db.execute(
            "INSERT INTO events (job, time, kind, text) VALUES (?, ?, ?, ?)",
            (job_id, now, event.kind, event.text),
        )

    def remove(self, job_id: str) -> None:
        """Forget a job. Its slices stay known until they are gone from the cloud."""
        with transaction(self._db):
            self._db.execute("DELETE FROM jobs WHERE number = ?", (int(job_id),))
            self._db.execute("DELETE FROM attempts WHERE job = ?", (job_id,))
            self._db.execute("DELETE FROM events WHERE job = ?", (job_id,))
            self._db.execute("DELETE FROM points WHERE job = ?", (job_id,))
            self._db.execute("DELETE FROM slices WHERE job = ? AND gone IS NOT NULL", (job_id,))

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """The attempts of a job, first to last."""
        rows = self._db.execute("SELECT * FROM attempts WHERE job = ? ORDER BY number", (job_id,))
        return [
            {key: row[key] for key in row.keys() if key not in {"job", "hosts"}}  # noqa: SIM118
            | {"hosts": json.loads(row["hosts"])}
            | {"course": json.loads(row["course"]) if row["course"] else None}
            for row in rows
        ]

    def events(self, job_id: str, after: int = 0) -> list[dict[str, Any]]:
        """The history of a job from an event on."""
        rows = self._db.execute(
            "SELECT id, time, kind, text FROM events WHERE job = ? AND id > ? ORDER BY id",
            (job_id, after),
        )
        return [dict(row) for row in rows]

    def slices(self, job_id: str) -> list[SliceRow]:
        """Every slice a job ever asked for."""
        rows = self._db.execute("SELECT * FROM slices WHERE job = ? ORDER BY asked", (job_id,))
        return [SliceRow(**dict(row)) for row in rows]

    def releasing(self) -> list[SliceRow]:
        """Slices that are to be deleted and have not been seen gone."""
        # Every round asks, and nobody else writes to this file: unchanged until we write.
        if self._releasing_at != self._db.total_changes:
            rows = self._db.execute(
                "SELECT * FROM slices WHERE released IS NOT NULL AND gone IS NULL ORDER BY released"
            )
            self._releasing = [SliceRow(**dict(row)) for row in rows]
            self._releasing_at = self._db.total_changes
        return list(self._releasing)

    def release_all(self, job_id: str, now: float) -> int:
        """Mark every slice of a job to be deleted; returns how many they are."""
        changed = self._db.execute(
            "UPDATE slices SET released = ? WHERE job = ? AND released IS NULL AND gone IS NULL",
            (now, job_id),
        )
        return changed.rowcount

    def held_aside(self) -> set[str]:
        """Slices of jobs that were set aside: whether they are still wanted is not known."""
        rows = self._db.execute(
            "SELECT slices.name FROM jobs JOIN slices ON slices.job = printf('%06d', jobs.number)"
            " WHERE jobs.trouble IS NOT NULL AND slices.released IS NULL AND slices.gone IS NULL"
        )
        return {row["name"] for row in rows}

    def adopt_stray(self, stray: SliceRow) -> None:
        """Add a slice with our label that no job holds, to be deleted."""
        self._db.execute(
            "INSERT INTO slices VALUES (?, ?, ?, ?, ?, ?, ?, NULL) ON CONFLICT (name) DO UPDATE"
            " SET released = coalesce(released, excluded.released), gone = NULL",
            (
                stray.name, stray.job, stray.zone, stray.accelerator,
                stray.asked, stray.ready, stray.released,
            ),
        )  # fmt: skip

    def gone(self, name: str, now: float) -> None:
        """Note that a slice has been seen gone from the cloud."""
        self._db.execute("UPDATE slices SET gone = ? WHERE name = ?", (now, name))

    def long_histories(self, most: int, of_old: int, old: float) -> list[tuple[str, int]]:
        """Jobs with over `most` events, `of_old` if they ended before `old`; and how many stay."""
        rows = self._db.execute(
            "SELECT events.job AS job, count(*) AS count,"
            " coalesce(max(ended), :old) < :old AS is_old"
            " FROM events LEFT JOIN jobs ON jobs.number = CAST(events.job AS INTEGER)"
            " GROUP BY events.job HAVING count(*) > :most",
            {"old": old, "most": of_old},
        )
        kept = [(row["job"], of_old if row["is_old"] else most, row["count"]) for row in rows]
        return [(job, keep) for job, keep, count in kept if count > keep + 1]

    def prune_events(self, job_id: str, keep: int) -> None:
        """Delete the events of a job except its first and the newest `keep`."""
        self._db.execute(
            "DELETE FROM events WHERE job = :job AND id <="
            " (SELECT id FROM events WHERE job = :job ORDER BY id DESC LIMIT 1 OFFSET :keep)"
            " AND id > (SELECT min(id) FROM events WHERE job = :job)",
            {"job": job_id, "keep": keep},
        )

    def prune_slices(self, keep: int, before: float) -> None:
        """Delete rows of slices gone before then: those of cleaned jobs, and all but `keep` of a
        job's that never came up."""
        self._db.execute(
            "DELETE FROM slices WHERE gone < ? AND (name IN (SELECT name FROM (SELECT name,"
            " row_number() OVER (PARTITION BY job ORDER BY asked DESC, name DESC) AS place"
            " FROM slices WHERE ready IS NULL AND gone IS NOT NULL) WHERE place > ?)"
            " OR NOT EXISTS (SELECT 1 FROM jobs WHERE number = CAST(slices.job AS INTEGER)))",
            (before, keep),
        )

    def zones_used(self) -> set[str]:
        """Zones where a slice of ours may be."""
        return {row["zone"] for row in self._db.execute("SELECT DISTINCT zone FROM slices")}

    def _write_state(self, job: Job, now: float) -> None:
        ended = job.status.ended
        self._db.execute(
            "UPDATE jobs SET state = ?, status = ?, live = ?,"
            " ended = CASE WHEN ? THEN coalesce(ended, ?) END WHERE number = ?",
            (
                _JOB.dump_json(job).decode(), job.status.value,
                not ended or job.placement is not None, ended, now, int(job.id),
            ),
        )  # fmt: skip

    def _write_events(self, job: Job, events: Iterable[Event], now: float) -> None:
        self._db.executemany(
            "INSERT INTO events (job, time, kind, text) VALUES (?, ?, ?, ?)",
            [(job.id, now, event.kind, event.text) for event in events],
        )

    # The times in a job's state order what happens and come from a clock that never steps. The
    # rows are for display: they take the wall time at which something was first saved.

    def _write_attempt(self, job: Job, attempt: Attempt, now: float) -> None:
        zone = job.placement.zone if job.placement else None
        accelerator = job.placement.accelerator if job.placement else None
        running = None if attempt.running_at is None else now
        self._db.execute(
            "INSERT INTO attempts (job, number, zone, accelerator, started, running)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (job, number) DO UPDATE SET"
            " zone = coalesce(excluded.zone, zone),"
            " accelerator = coalesce(excluded.accelerator, accelerator),"
            " running = coalesce(running, excluded.running)",
            (job.id, attempt.number, zone, accelerator, now, running),
        )

    def _write_slice(self, job_id: str, held: Placement, now: float) -> None:
        ready = None if held.ready_at is None else now
        self._db.execute(
            "INSERT INTO slices (name, job, zone, accelerator, asked, ready)"
            " VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET ready = coalesce(ready, excluded.ready)",
            (held.name, job_id, held.zone, held.accelerator, now, ready),
        )


def _aside(row: sqlite3.Row, reason: str) -> SetAside:
    return SetAside(f"{row['number']:06}", row["user"], row["name"], reason)


def _why_unreadable(wrong: Exception) -> str:
    if isinstance(wrong, ValidationError):
        first = wrong.errors()[0]
        place = ".".join(map(str, first["loc"])) or "state"
        return f"{place}: {first['msg'].lower()}"
    return str(wrong)


def _host(report: HostReport) -> dict[str, Any]:
    return {
        key: getattr(report, key)
        for key in ("index", "phase", "exit_code", "error", "error_at", "tail", "detail")
    }
