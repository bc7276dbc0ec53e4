"""Metrics that programs reported, on disk: the newest of each job, steps of attempts, points."""

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
    """A step of an attempt, when it was seen, and the metrics reported with it."""

    attempt: int
    time: float
    step: float
    metrics: Mapping[str, float]


class Metrics:
    """The part of the database that programs fill by their heartbeats."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """`db` is the store's connection."""
        self._db = db

    def put(
        self,
        job_id: str,
        progress: Mapping[str, object] | None,
        steps: Mapping[int, Steps],
        points: Iterable[Point],
    ) -> None:
        """Save what a program reported: its newest metrics, the steps of attempts, and points."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE jobs SET progress = coalesce(?, progress) WHERE number = ?",
                (None if progress is None else json.dumps(progress), int(job_id)),
            )
            self._db.executemany(
                "UPDATE attempts SET course = ? WHERE job = ? AND number = ?",
                [
                    (_STEPS.dump_json(reached).decode(), job_id, number)
                    for number, reached in steps.items()
                ],
            )
            self._db.executemany(
                "INSERT INTO points (job, attempt, time, step, metrics) VALUES (?, ?, ?, ?, ?)",
                [(job_id, p.attempt, p.time, p.step, json.dumps(dict(p.metrics))) for p in points],
            )

    def steps(self, job_id: str, attempt: int) -> Steps | None:
        """The steps of an attempt, if it reported any."""
        row = self._db.execute(
            "SELECT course FROM attempts WHERE job = ? AND number = ?", (job_id, attempt)
        ).fetchone()
        return _steps(row) if row else None

    def steps_by_attempt(self, job_id: str) -> dict[int, Steps]:
        """The steps of each attempt of a job that reported any."""
        rows = self._db.execute(
            "SELECT number, course FROM attempts WHERE job = ? ORDER BY number", (job_id,)
        )
        return {row["number"]: found for row in rows if (found := _steps(row))}

    def points(self, job_id: str) -> list[Point]:
        """The history of a job's metrics."""
        rows = self._db.execute("SELECT * FROM points WHERE job = ? ORDER BY id", (job_id,))
        return [_point(row) for row in rows]

    def first_and_last_point(self, job_id: str) -> tuple[float | None, Point | None]:
        """When the history begins, and its last point."""
        query = "SELECT * FROM points WHERE job = ? ORDER BY id"
        first = self._db.execute(f"{query} LIMIT 1", (job_id,)).fetchone()
        last = self._db.execute(f"{query} DESC LIMIT 1", (job_id,)).fetchone()
        return (first["time"], _point(last)) if first else (None, None)

    def progress(self, job_id: str) -> dict[str, Any] | None:
        """The newest metrics of a job, if it reported any."""
        query = "SELECT progress FROM jobs WHERE number = ?"
        row = self._db.execute(query, (int(job_id),)).fetchone()
        return dict(json.loads(row["progress"])) if row and row["progress"] else None


def _steps(row: sqlite3.Row) -> Steps | None:
    return _STEPS.validate_json(row["course"]) if row["course"] else None


def _point(row: sqlite3.Row) -> Point:
    return Point(row["attempt"], row["time"], row["step"], json.loads(row["metrics"]))
