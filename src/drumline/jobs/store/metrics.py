"""The reported metrics on disk: the newest of each job, steps of attempts, and points."""

import json
import sqlite3
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from drumline.jobs.core.steps import Steps
from drumline.jobs.store.schema import transaction

_STEPS = TypeAdapter(Steps)


@dataclass(frozen=True)
class Point:
    """A step of an attempt, the time when it was observed, and its metrics."""

    attempt: int
    time: float
    step: float
    metrics: Mapping[str, float]


class MetricsTable:
    """The columns and the table of the database with metrics from heartbeats."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """`db` is the store's connection."""
        self._db = db

    def save(
        self,
        job_id: str,
        progress: Mapping[str, object] | None,
        steps: Mapping[int, Steps],
        points: Iterable[Point],
    ) -> None:
        """Save a job's newest metrics, the steps of its attempts, and its new points."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE jobs SET progress = coalesce(?, progress) WHERE number = ?",
                (None if progress is None else json.dumps(progress), int(job_id)),
            )
            self._db.executemany(
                "UPDATE attempts SET course = ? WHERE job = ? AND number = ?",
                [
                    (_STEPS.dump_json(attempt_steps).decode(), job_id, attempt)
                    for attempt, attempt_steps in steps.items()
                ],
            )
            self._db.executemany(
                "INSERT INTO points (job, attempt, time, step, metrics) VALUES (?, ?, ?, ?, ?)",
                [(job_id, p.attempt, p.time, p.step, json.dumps(dict(p.metrics))) for p in points],
            )

    def steps(self, job_id: str, attempt: int) -> Steps | None:
        """Return the steps of an attempt; None if it reported none."""
        row = self._db.execute(
            "SELECT course FROM attempts WHERE job = ? AND number = ?", (job_id, attempt)
        ).fetchone()
        return _steps(row) if row else None

    def steps_by_attempt(self, job_id: str) -> dict[int, Steps]:
        """Return the steps of each attempt of a job that reported any."""
        rows = self._db.execute(
            "SELECT number, course FROM attempts WHERE job = ? ORDER BY number", (job_id,)
        )
        return {row["number"]: steps for row in rows if (steps := _steps(row))}

    def points(self, job_id: str) -> list[Point]:
        """Return the history of a job's metrics."""
        rows = self._db.execute("SELECT * FROM points WHERE job = ? ORDER BY id", (job_id,))
        return [_point(row) for row in rows]

    def first_and_last_point(self, job_id: str) -> tuple[float | None, Point | None]:
        """Return the time of the first point of a job, and its last point."""
        query = "SELECT * FROM points WHERE job = ? ORDER BY id"
        first = self._db.execute(f"{query} LIMIT 1", (job_id,)).fetchone()
        last = self._db.execute(f"{query} DESC LIMIT 1", (job_id,)).fetchone()
        return (first["time"], _point(last)) if first else (None, None)

    def progress(self, job_id: str) -> dict[str, Any] | None:
        """Return the newest metrics of a job; None if it reported none."""
        query = "SELECT progress FROM jobs WHERE number = ?"
        row = self._db.execute(query, (int(job_id),)).fetchone()
        return dict(json.loads(row["progress"])) if row and row["progress"] else None


def _steps(row: sqlite3.Row) -> Steps | None:
    return _STEPS.validate_json(row["course"]) if row["course"] else None


def _point(row: sqlite3.Row) -> Point:
    return Point(row["attempt"], row["time"], row["step"], json.loads(row["metrics"]))
