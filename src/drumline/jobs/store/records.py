"""The job database: jobs, attempts, slices, events and hosts in one SQLite file.

With WAL and synchronous=FULL, a change is on disk before the server answers the caller. Each
decision is saved in one transaction, before the supervisor acts on it.
"""

import json
import logging
import os
import secrets
import sqlite3
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from drumline.jobs.core.host_history import HostRecord
from drumline.jobs.core.reasons import EventType
from drumline.jobs.core.state import (
    Attempt,
    Candidate,
    Decision,
    DesiredState,
    EffectType,
    Event,
    Job,
    OldProgram,
    Placement,
)
from drumline.jobs.core.zone_history import MAX_EVENTS, ZoneEvent, ZoneEventType
from drumline.jobs.store.metrics import MetricsTable
from drumline.jobs.store.schema import SchemaError, transaction, upgrade
from drumline.jobs.store.specs import StoredSpec
from drumline.observed import HostReport

_JOB = TypeAdapter(Job)


@dataclass(frozen=True)
class Record:
    """A job with its user, name and spec."""

    job: Job
    user: str
    name: str
    spec: StoredSpec


@dataclass(frozen=True)
class UnreadableJob:
    """A job whose row cannot be read. It stays as it is until the user decides."""

    id: str
    user: str
    name: str
    reason: str


class UnreadableJobError(Exception):
    """A job's row cannot be read. The text is the reason."""

    def __init__(self, job: UnreadableJob) -> None:
        """`job` has the columns that can be read."""
        super().__init__(job.reason)
        self.job = job


@dataclass(frozen=True)
class SliceRow:
    """A placement that was requested. It costs money from `ready` to `gone`."""

    name: str
    job: str
    zone: str
    accelerator: str
    asked: float
    ready: float | None
    released: float | None
    gone: float | None
    program: str = ""
    """What is known of its program, an `OldProgram`."""


UNREADABLE = "UNREADABLE"
"""The listed status of a job whose row cannot be read."""
MAX_ENDED = 1000
"""The maximum number of finished jobs in a list without a limit."""


@dataclass(frozen=True)
class JobFilter:
    """The filters of a list of jobs. Those that are None or empty do not apply."""

    since: float | None = None
    """Omit jobs that finished before this timestamp."""
    status: tuple[str, ...] = ()
    name: str | None = None
    """Part of the name, or a pattern with * and ?."""
    user: str | None = None
    limit: int | None = None
    """The number of newest jobs; None is all active jobs and the newest MAX_ENDED finished jobs."""
    before: str | None = None
    """List only jobs older than this one, for the next page."""

    @property
    def paged(self) -> bool:
        """True if the list ends after a number of jobs, including active jobs."""
        return self.limit is not None or self.before is not None


def sql_condition(job_filter: JobFilter) -> tuple[str, list[object]]:
    """Return the SQL condition on rows of `jobs`, and the values for its question marks."""
    terms: list[str] = ["1"]
    values: list[object] = []
    if job_filter.since is not None:
        terms.append("(live = 1 OR trouble IS NOT NULL OR ended > ?)")
        values.append(job_filter.since)
    if job_filter.status:
        marks = ", ".join("?" * len(job_filter.status))
        shown = f"CASE WHEN trouble IS NULL THEN status ELSE '{UNREADABLE}' END"
        terms.append(f"{shown} IN ({marks})")
        values += job_filter.status
    if job_filter.name is not None:
        pattern = job_filter.name if set(job_filter.name) & set("*?") else f"*{job_filter.name}*"
        terms.append("name GLOB ?")
        # GLOB would read a bracket as the start of a character set.
        values.append(pattern.replace("[", "[[]"))
    if job_filter.user is not None:
        terms.append("user = ?")
        values.append(job_filter.user)
    if job_filter.before is not None:
        terms.append("number < ?")
        values.append(int(job_filter.before))
    return " AND ".join(terms), values


log = logging.getLogger(__name__)

_HOST = TypeAdapter(HostRecord)


class HostTable:
    """The table of hosts that jobs were given, one row for each."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """`db` is the store's connection."""
        self._db = db

    def all(self) -> dict[str, HostRecord]:
        """Return every host by its identity. A row that cannot be read stays in the table."""
        hosts = {}
        for row in self._db.execute("SELECT identity, record FROM hosts ORDER BY identity"):
            try:
                hosts[row["identity"]] = _HOST.validate_json(row["record"])
            except ValidationError as error:
                log.warning("the row of host %s cannot be read: %s", row["identity"], error)
        return hosts

    def save(self, host: HostRecord) -> None:
        """Add a host, or replace its row."""
        self._db.execute(
            "INSERT INTO hosts VALUES (?, ?, ?) ON CONFLICT (identity)"
            " DO UPDATE SET last = excluded.last, record = excluded.record",
            (host.name.identity, host.last_seen, _HOST.dump_json(host).decode()),
        )

    def remove(self, identity: str) -> None:
        """Delete the row of a host."""
        self._db.execute("DELETE FROM hosts WHERE identity = ?", (identity,))


class Store:
    """The job database, for use from one thread. Each method is one transaction."""

    def __init__(self, path: Path) -> None:
        """Open the file; create it if it does not exist. Raise SchemaError if it is unusable."""
        if os.path.lexists(path) and not path.is_file():
            raise SchemaError(f"{path} is not a file; move it away")
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            upgrade(self._db)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) and "disk is full" in str(error):
                raise
            raise SchemaError(_unusable(path, error)) from error
        self.metrics = MetricsTable(self._db)
        self.hosts = HostTable(self._db)
        self._releasing: list[SliceRow] = []
        self._releasing_at = -1
        self._db.execute("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (secrets.token_hex(4),))
        row = self._db.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
        self.owner = str(row["value"])
        """The id of this database in its project: eight characters that never change."""

    def require_original(self, home: Path) -> None:
        """Save the folder of this home. Raise SchemaError if the home is a copy of another one.

        Two databases with one id request slices by the same names, release each other's, and
        number their attempts alike.
        """
        folder = os.path.realpath(home)
        row = self._db.execute("SELECT value FROM meta WHERE key = 'home'").fetchone()
        if row is not None and row["value"] != folder:
            original = Path(row["value"])
            if _owner_of(original / "jobs.db") == self.owner and not original.samefile(folder):
                raise SchemaError(
                    f"{folder} is a copy of the home {original}, and two servers with one database"
                    f" would release each other's slices; use only one of them: remove"
                    f" {folder}/jobs.db for a home with jobs of its own, or to go on here, remove"
                    f" {original}/jobs.db after drumline server stop there"
                )
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('home', ?)", (folder,))

    def record_cloud(self, cloud: str) -> None:
        """Record the cloud of this server, so that a home without slices of Google is known.

        An older release recorded none, and its slices may be on Google.
        """
        with transaction(self._db):
            row = self._db.execute("SELECT value FROM meta WHERE key = 'clouds'").fetchone()
            if row is not None:
                clouds = set(row["value"].split())
            else:
                any_slice = self._db.execute("SELECT 1 FROM slices LIMIT 1").fetchone()
                clouds = {"google"} if any_slice else set()
            clouds.add(cloud)
            self._db.execute(
                "INSERT OR REPLACE INTO meta VALUES ('clouds', ?)", (" ".join(sorted(clouds)),)
            )

    def next_fence(self) -> int:
        """Return the fencing number of a new attempt, greater than all before."""
        row = self._db.execute(
            "INSERT INTO meta VALUES ('fence', '1') ON CONFLICT (key) DO UPDATE"
            " SET value = CAST(CAST(value AS INTEGER) + 1 AS TEXT) RETURNING value"
        ).fetchone()
        return int(row["value"])

    def skip_fence_to(self, fence: int) -> None:
        """Make the next fencing number greater than this one."""
        if fence:
            self._db.execute(
                "INSERT INTO meta VALUES ('fence', :number) ON CONFLICT (key) DO UPDATE"
                " SET value = :number WHERE CAST(value AS INTEGER) < CAST(:number AS INTEGER)",
                {"number": str(fence)},
            )

    def check_writable(self) -> None:
        """Write a value without an effect. Raises if the disk is full."""
        self._db.execute("UPDATE meta SET value = value WHERE key = 'owner'")

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def add(
        self, user: str, name: str, spec: Mapping[str, Any], make: Callable[[str], Job]
    ) -> Record:
        """Save a new job under the next free id. `make` returns its state for that id."""
        stored_spec = StoredSpec.from_json(spec)
        with transaction(self._db):
            row = self._db.execute(
                "INSERT INTO jobs (user, name, spec, state) VALUES (?, ?, ?, '') RETURNING number",
                (user, name, json.dumps(spec)),
            ).fetchone()
            job = make(f"{row['number']:06}")
            self._write_state(job, job.created_at)
            self._write_events(job, (Event(EventType.CREATED, name),), job.created_at)
        return Record(job, user, name, stored_spec)

    def living(self) -> list[Record]:
        """Return every job that has not finished or still holds slices, oldest first.

        A row that cannot be read is marked with the reason. The next start retries it, because it
        may be of a different version of Drumline.
        """
        rows = self._db.execute("SELECT * FROM jobs WHERE live = 1 ORDER BY number").fetchall()
        records = []
        for row in rows:
            with suppress(UnreadableJobError):
                records.append(self._record(row))
        return records

    def record(self, job_id: str) -> Record | None:
        """Return a job; None if none has that id. Raises UnreadableJobError."""
        query = "SELECT * FROM jobs WHERE number = ?"
        row = self._db.execute(query, (int(job_id),)).fetchone()
        return self._record(row) if row else None

    def _record(self, row: sqlite3.Row) -> Record:
        try:
            job = _JOB.validate_json(row["state"])
            spec = StoredSpec.from_json(json.loads(row["spec"]))
        except (ValueError, RecursionError) as error:
            unreadable = _unreadable_job(row, _reason(error))
            self._mark(row, unreadable.reason)
            raise UnreadableJobError(unreadable) from None
        self._mark(row, None)
        return Record(job, row["user"], row["name"], spec)

    def _mark(self, row: sqlite3.Row, reason: str | None) -> None:
        """Save the reason why a row cannot be read; None if it can."""
        if row["trouble"] != reason:
            query = "UPDATE jobs SET trouble = ? WHERE number = ?"
            # On a full disk, the next read of the row saves it.
            with suppress(sqlite3.OperationalError):
                self._db.execute(query, (reason, row["number"]))

    def unreadable_jobs(self) -> list[UnreadableJob]:
        """Return the jobs whose rows cannot be read."""
        rows = self._db.execute("SELECT * FROM jobs WHERE trouble IS NOT NULL ORDER BY number")
        return [_unreadable_job(row, row["trouble"]) for row in rows]

    def last_number(self) -> int:
        """Return the highest job number ever used."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'jobs'").fetchone()
        return int(row["seq"]) if row else 0

    def skip_to(self, number: int) -> None:
        """Make the next job number greater than this one."""
        if number > self.last_number():
            with transaction(self._db):
                self._db.execute("DELETE FROM sqlite_sequence WHERE name = 'jobs'")
                self._db.execute("INSERT INTO sqlite_sequence VALUES ('jobs', ?)", (number,))

    def count(self) -> int:
        """Return the number of all jobs."""
        return int(self._db.execute("SELECT count(*) FROM jobs").fetchone()[0])

    def find(self, job_filter: JobFilter) -> list[str]:
        """Return the ids of the jobs that match, oldest first."""
        condition, values = sql_condition(job_filter)
        if job_filter.paged:
            numbers = self._numbers(condition, values, job_filter.limit or MAX_ENDED)
        else:
            numbers = self._numbers(f"{condition} AND live = 1", values, None)
            numbers += self._numbers(f"{condition} AND live = 0", values, MAX_ENDED)
        return [f"{number:06}" for number in sorted(numbers)]

    def named(self, name: str) -> list[str]:
        """Return the ids of the jobs with this name, oldest first.

        Deleted jobs are omitted, unless all matching jobs were deleted.
        """
        rows = self._db.execute(
            "SELECT number, CASE WHEN json_valid(state) THEN json_extract(state, '$.wish') END"
            " AS wish FROM jobs WHERE name = ? ORDER BY number",
            (name,),
        ).fetchall()
        kept = [row for row in rows if row["wish"] != DesiredState.DELETE]
        return [f"{row['number']:06}" for row in kept or rows]

    def _numbers(self, condition: str, values: list[object], limit: int | None) -> list[int]:
        # The condition has only columns and question marks, and no text of the user.
        query = f"SELECT number FROM jobs WHERE {condition} ORDER BY number DESC LIMIT ?"  # noqa: S608
        rows = self._db.execute(query, (*values, -1 if limit is None else limit))
        return [row["number"] for row in rows]

    def save(
        self,
        decision: Decision,
        now: float,
        reports: Iterable[HostReport] = (),
        spec: StoredSpec | None = None,
        old_programs: Mapping[str, OldProgram] = MappingProxyType({}),
    ) -> None:
        """Save a decision, and the last `reports` of the hosts of a finished attempt.

        A `spec` replaces that of the job. `old_programs` are the programs on released slices.
        """
        job = decision.job
        hosts = json.dumps([_report_as_json(report) for report in reports])
        with transaction(self._db):
            self._write_state(job, now)
            if spec is not None:
                self._db.execute(
                    "UPDATE jobs SET spec = ?, name = coalesce(?, name) WHERE number = ?",
                    (json.dumps(spec.document), spec.name, int(job.id)),
                )
            self._write_events(job, decision.events, now)
            for ended in decision.ended:
                # The placements are those after the attempt, which has saved its own before.
                self._write_attempt(job.id, ended.attempt, None, now)
                self._db.execute(
                    "UPDATE attempts SET ended = ?, outcome = ?, detail = ?, hosts = ?"
                    " WHERE job = ? AND number = ?",
                    (
                        now, ended.reason.outcome, ended.detail, hosts,
                        job.id, ended.attempt.number,
                    ),
                )  # fmt: skip
            if job.attempt is not None:
                self._write_attempt(job.id, job.attempt, job.leading, now)
            for placement in job.placements:
                self._write_slice(job.id, placement, now)
            for effect in decision.effects:
                if effect.kind is EffectType.RELEASE:
                    name = effect.placement.name
                    self._write_slice(job.id, effect.placement, now)
                    self._db.execute(
                        "UPDATE slices SET released = ?, program = ?"
                        " WHERE name = ? AND released IS NULL",
                        (now, old_programs.get(name, OldProgram.UNKNOWN).value, name),
                    )

    def add_event(self, job_id: str, event: Event, now: float) -> None:
        """Add an event to a job's history."""
        self._db.execute(
            "INSERT INTO events (job, time, kind, text, fields) VALUES (?, ?, ?, ?, ?)",
            (job_id, now, event.kind.value, event.text, json.dumps(event.fields)),
        )

    def remove(self, job_id: str) -> None:
        """Delete a job. The rows of its slices stay until the cloud has deleted the slices."""
        with transaction(self._db):
            self._db.execute("DELETE FROM jobs WHERE number = ?", (int(job_id),))
            self._db.execute("DELETE FROM attempts WHERE job = ?", (job_id,))
            self._db.execute("DELETE FROM events WHERE job = ?", (job_id,))
            self._db.execute("DELETE FROM points WHERE job = ?", (job_id,))
            self._db.execute("DELETE FROM slices WHERE job = ? AND gone IS NOT NULL", (job_id,))

    def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """Return the attempts of a job, first to last."""
        rows = self._db.execute("SELECT * FROM attempts WHERE job = ? ORDER BY number", (job_id,))
        return [
            {key: row[key] for key in row.keys() if key not in {"job", "hosts"}}  # noqa: SIM118
            | {"hosts": json.loads(row["hosts"])}
            | {"course": json.loads(row["course"]) if row["course"] else None}
            for row in rows
        ]

    def events(self, job_id: str, after: int = 0) -> list[dict[str, Any]]:
        """Return the events of a job after a given one."""
        rows = self._db.execute(
            "SELECT id, time, kind, text, fields FROM events WHERE job = ? AND id > ? ORDER BY id",
            (job_id, after),
        )
        return [dict(row) | {"fields": json.loads(row["fields"])} for row in rows]

    def slices(self, job_id: str) -> list[SliceRow]:
        """Return every placement that a job has requested."""
        rows = self._db.execute("SELECT * FROM slices WHERE job = ? ORDER BY asked", (job_id,))
        return [SliceRow(**dict(row)) for row in rows]

    def held_slices(self) -> list[str]:
        """Return the names of all slices that were requested and not released."""
        rows = self._db.execute(
            "SELECT name FROM slices WHERE released IS NULL AND gone IS NULL ORDER BY asked"
        )
        return [row["name"] for row in rows]

    def releasing(self) -> list[SliceRow]:
        """Return the slices that are being deleted and may still exist."""
        # Cached for the rounds of the supervisor, because only this connection writes to the file.
        if self._releasing_at != self._db.total_changes:
            rows = self._db.execute(
                "SELECT * FROM slices WHERE released IS NOT NULL AND gone IS NULL ORDER BY released"
            )
            self._releasing = [SliceRow(**dict(row)) for row in rows]
            self._releasing_at = self._db.total_changes
        return list(self._releasing)

    def release_all(self, job_id: str, now: float) -> int:
        """Mark every slice of a job to be deleted. Return their number."""
        changed = self._db.execute(
            "UPDATE slices SET released = ? WHERE job = ? AND released IS NULL AND gone IS NULL",
            (now, job_id),
        )
        return changed.rowcount

    def slices_of_unreadable_jobs(self) -> set[str]:
        """Return the slices of unreadable jobs, which may still need them."""
        rows = self._db.execute(
            "SELECT slices.name FROM jobs JOIN slices ON slices.job = printf('%06d', jobs.number)"
            " WHERE jobs.trouble IS NOT NULL AND slices.released IS NULL AND slices.gone IS NULL"
        )
        return {row["name"] for row in rows}

    def adopt_orphan(self, row: SliceRow) -> None:
        """Add a slice with this database's label that no job holds, to be deleted."""
        self._db.execute(
            "INSERT INTO slices (name, job, zone, accelerator, asked, ready, released)"
            " VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (name) DO UPDATE SET"
            " released = coalesce(released, excluded.released), gone = NULL",
            (
                row.name, row.job, row.zone, row.accelerator,
                row.asked, row.ready, row.released,
            ),
        )  # fmt: skip

    def record_program(self, name: str, program: OldProgram) -> None:
        """Record what is known of the program on a slice that is being deleted."""
        self._db.execute("UPDATE slices SET program = ? WHERE name = ?", (program.value, name))

    def record_ready(self, name: str, now: float) -> None:
        """Record that a slice was granted and costs money."""
        self._db.execute("UPDATE slices SET ready = coalesce(ready, ?) WHERE name = ?", (now, name))

    def add_zone_event(self, candidate: Candidate, event: ZoneEvent) -> None:
        """Add an event of a zone and accelerator, and delete its oldest one beyond a limit."""
        key = (candidate.accelerator, candidate.zone)
        with transaction(self._db):
            self._db.execute(
                "INSERT INTO zone_events (accelerator, zone, time, kind, seconds)"
                " VALUES (?, ?, ?, ?, ?)",
                (*key, event.at, event.kind.value, event.seconds),
            )
            self._db.execute(
                "DELETE FROM zone_events WHERE id IN (SELECT id FROM zone_events"
                " WHERE accelerator = ? AND zone = ? ORDER BY id DESC LIMIT -1 OFFSET ?)",
                (*key, MAX_EVENTS),
            )

    def zone_events(self) -> dict[Candidate, list[ZoneEvent]]:
        """Return the newest events of each zone and accelerator, oldest first."""
        rows = self._db.execute(
            "SELECT accelerator, zone, time, kind, seconds FROM zone_events ORDER BY id"
        )
        events: dict[Candidate, list[ZoneEvent]] = {}
        for accelerator, zone, time, kind, seconds in rows:
            event = ZoneEvent(time, ZoneEventType(kind), seconds)
            events.setdefault(Candidate(accelerator, zone), []).append(event)
        return events

    def gone(self, name: str, now: float) -> None:
        """Record that a slice no longer exists in the cloud."""
        self._db.execute("UPDATE slices SET gone = ? WHERE name = ?", (now, name))

    def long_histories(self, limit: int, old_limit: int, old: float) -> list[tuple[str, int]]:
        """Return the jobs with more events than `limit`, and the limit of each.

        It is `old_limit` for jobs that finished before the timestamp `old`.
        """
        rows = self._db.execute(
            "SELECT events.job AS job, count(*) AS count,"
            " coalesce(max(ended), :old) < :old AS is_old"
            " FROM events LEFT JOIN jobs ON jobs.number = CAST(events.job AS INTEGER)"
            " GROUP BY events.job HAVING count(*) > :most",
            {"old": old, "most": old_limit},
        )
        limits = [(row["job"], old_limit if row["is_old"] else limit, row["count"]) for row in rows]
        return [(job, keep) for job, keep, count in limits if count > keep + 1]

    def prune_events(self, job_id: str, keep: int) -> None:
        """Delete the events of a job except its first and the newest `keep`."""
        self._db.execute(
            "DELETE FROM events WHERE job = :job AND id <="
            " (SELECT id FROM events WHERE job = :job ORDER BY id DESC LIMIT 1 OFFSET :keep)"
            " AND id > (SELECT min(id) FROM events WHERE job = :job)",
            {"job": job_id, "keep": keep},
        )

    def prune_slices(self, keep: int, before: float) -> None:
        """Delete rows of slices that were deleted before a time.

        These are the slices of deleted jobs, and of each job all but `keep` that were never ready.
        """
        self._db.execute(
            "DELETE FROM slices WHERE gone < ? AND (name IN (SELECT name FROM (SELECT name,"
            " row_number() OVER (PARTITION BY job ORDER BY asked DESC, name DESC) AS place"
            " FROM slices WHERE ready IS NULL AND gone IS NOT NULL) WHERE place > ?)"
            " OR NOT EXISTS (SELECT 1 FROM jobs WHERE number = CAST(slices.job AS INTEGER)))",
            (before, keep),
        )

    def zones_used(self) -> set[str]:
        """Return the zones that slices of this database have used."""
        return {row["zone"] for row in self._db.execute("SELECT DISTINCT zone FROM slices")}

    def _write_state(self, job: Job, now: float) -> None:
        ended = job.status.ended
        self._db.execute(
            "UPDATE jobs SET state = ?, status = ?, live = ?,"
            " ended = CASE WHEN ? THEN coalesce(ended, ?) END WHERE number = ?",
            (
                _JOB.dump_json(job).decode(), job.status.value,
                not ended or bool(job.placements), ended, now, int(job.id),
            ),
        )  # fmt: skip

    def _write_events(self, job: Job, events: Iterable[Event], now: float) -> None:
        self._db.executemany(
            "INSERT INTO events (job, time, kind, text, fields) VALUES (?, ?, ?, ?, ?)",
            [(job.id, now, e.kind.value, e.text, json.dumps(e.fields)) for e in events],
        )

    # The times in a job's state are of a clock that never jumps. The rows are for display and have
    # the wall time at which a change was first saved.

    def _write_attempt(
        self, job_id: str, attempt: Attempt, placement: Placement | None, now: float
    ) -> None:
        zone = placement.zone if placement else None
        accelerator = placement.accelerator if placement else None
        running = None if attempt.running_at is None else now
        self._db.execute(
            "INSERT INTO attempts (job, number, zone, accelerator, started, running)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (job, number) DO UPDATE SET"
            " zone = coalesce(excluded.zone, zone),"
            " accelerator = coalesce(excluded.accelerator, accelerator),"
            " running = coalesce(running, excluded.running)",
            (job_id, attempt.number, zone, accelerator, now, running),
        )

    def _write_slice(self, job_id: str, placement: Placement, now: float) -> None:
        ready = None if placement.ready_at is None else now
        self._db.execute(
            "INSERT INTO slices (name, job, zone, accelerator, asked, ready)"
            " VALUES (?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (name) DO UPDATE SET ready = coalesce(ready, excluded.ready)",
            (placement.name, job_id, placement.zone, placement.accelerator, now, ready),
        )


def _unusable(path: Path, error: sqlite3.DatabaseError) -> str:
    """Return what is wrong with the file of the database, and what to do."""
    if not os.access(path, os.R_OK | os.W_OK) or "readonly" in str(error):
        fix = f"give yourself access: chmod u+rw {path} {path.parent}"
    elif "locked" in str(error):
        fix = "another program has it open; close that program"
    else:
        fix = (
            "restore a copy of it, or move it away to begin a new one; drumline server strays"
            " then lists the slices that still run"
        )
    return f"{path} cannot be used ({error}); {fix}"


def _unreadable_job(row: sqlite3.Row, reason: str) -> UnreadableJob:
    return UnreadableJob(f"{row['number']:06}", row["user"], row["name"], reason)


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "state"
        return f"{key}: {first['msg'].lower()}"
    return str(error)


def _report_as_json(report: HostReport) -> dict[str, Any]:
    return {
        key: getattr(report, key)
        for key in ("index", "phase", "exit_code", "error", "error_at", "tail", "detail")
    }


def _owner_of(path: Path) -> str | None:
    """Return the id of another database; None if there is none, or if it cannot be read."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as db:
            row = db.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
    except sqlite3.Error:
        return None
    return str(row[0]) if row else None
