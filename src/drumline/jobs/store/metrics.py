"""What programs told of their steps, on disk: the newest report, each attempt's steps, points."""

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
    """A step of an attempt, when it was seen, and what the program told with it."""

    attempt: int
    time: float
    step: float
    metrics: Mapping[str, float]


class Told:
    """The part of the database that programs fill."""

    def __init__(self, db: sqlite3.Connection) -> None:
        """Work on the store's connection."""
        self._db = db

    def put(
        self,
        job_id: str,
        progress: Mapping[str, object] | None,
        steps: Mapping[int, Steps],
        points: Iterable[Point],
    ) -> None:
        """Keep what a program told: its newest report, how attempts have gone, and the history."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE jobs SET progress = coalesce(?, progress) WHERE number = ?",
                (None if progress is None else json.dumps(progress), int(job_id)),
            )
            self._db.executemany(
                "UPDATE attempts SET course = ? WHERE job = ? AND number = ?",
                [
                    (_STEPS.dump_json(told).decode(), job_id, number)
                    for number, told in steps.items()
                ],
            )
            self._db.executemany(
                "INSERT INTO points (job, attempt, time, step, metrics) VALUES (?, ?, ?, ?, ?)",
                [(job_id, p.attempt, p.time, p.step, json.dumps(dict(p.metrics))) for p in points],
            )

    def steps(self, job_id: str, attempt: int) -> Steps | None:
        """How an attempt has gone, if it told anything."""
        row = self._db.execute(
            "SELECT course FROM attempts WHERE job = ? AND number = ?", (job_id, attempt)
        ).fetchone()
        return _steps(row) if row else None

    def steps_by_attempt(self, job_id: str) -> dict[int, Steps]:
        """How the attempts of a job have gone: those that told anything."""
        rows = self._db.execute(
            "SELECT number, course FROM attempts WHERE job = ? ORDER BY number", (job_id,)
        )
        return {row["number"]: found for row in rows if (found := _steps(row))}

    def points(self, job_id: str) -> list[Point]:
        """The history of what a job told."""
        rows = self._db.execute("SELECT * FROM points WHERE job = ? ORDER BY id", (job_id,))
        return [_point(row) for row in rows]

    def first_and_last_point(self, job_id: str) -> tuple[float | None, Point | None]:
        """When the history begins, and its end."""
        query = "SELECT * FROM points WHERE job = ? ORDER BY id"
        first = self._db.execute(f"{query} LIMIT 1", (job_id,)).fetchone()
        last = self._db.execute(f"{query} DESC LIMIT 1", (job_id,)).fetchone()
        return (first["time"], _point(last)) if first else (None, None)

    def progress(self, job_id: str) -> dict[str, Any] | None:
        """The last that a job told, if anything."""
        query = "SELECT progress FROM jobs WHERE number = ?"
        row = self._db.execute(query, (int(job_id),)).fetchone()
        return dict(json.loads(row["progress"])) if row and row["progress"] else None


def _steps(row: sqlite3.Row) -> Steps | None:
    return _STEPS.validate_json(row["course"]) if row["course"] else None


def _point(row: sqlite3.Row) -> Point:
    return Point(row["attempt"], row["time"], row["step"], json.loads(row["metrics"]))
