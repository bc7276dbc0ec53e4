"""What server and agent say to each other: the program going out, what the agent answers.

A host runs the user's code, so nothing that comes from it is believed unchecked.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import quote

from pydantic import BaseModel, Field

from drumline.hosts.values import Address, Program


@dataclass(frozen=True)
class HostRank:
    """What one host is to the program: its number on the slice, and among those that run."""

    index: int
    address: Address
    rank: int | None
    """None: it is prepared but runs nothing."""
    ranks: int


class Done(BaseModel):
    """An answer that only says it was done."""


class AttemptStatus(BaseModel):
    """What the agent knows of the attempt."""

    state: Literal["none", "running", "exited", "lost"]
    stopped: bool = False
    started_at: float | None = None
    coordinator: str = ""
    exit_code: int | None = None
    error: str = ""
    error_at: float | None = None
    tail: tuple[str, ...] = ()
    going_down: str = ""
    heartbeat: dict[str, object] | None = None
    log_size: int | None = None


class StepEnded(BaseModel):
    """How a set-up step ended."""

    exit_code: int
    error: str = ""
    tail: tuple[str, ...] = ()


class Line(BaseModel):
    """One line of `watch`."""

    log: str | None = None
    offset: int = Field(default=0, ge=0)
    at: float | None = Field(default=None, ge=0, le=1e11)
    """When the log was written, by the host's clock."""
    status: AttemptStatus | None = None


class Prepared(BaseModel):
    """What a host still lacks."""

    trouble: str = ""
    """Why its chips cannot be used."""
    have_code: bool


class Port(BaseModel):
    """A free port."""

    port: int = Field(gt=0, lt=65536)


def from_line(line: str | bytes) -> Any:
    """One JSON value; NaN, Infinity and endless digits, which a heartbeat may hold, become text."""
    return json.loads(line, parse_constant=str, parse_int=_whole)


def _whole(digits: str) -> int | str:
    return int(digits) if len(digits) <= _MOST_DIGITS else digits[:_MOST_DIGITS] + "…"


_MOST_DIGITS = 40


def attempt_folder(program: Program) -> str:
    """Where the attempt is kept on the host, below ~/.drumline."""
    return f"jobs/{_safe(program.job_id)}/{program.attempt}"


def work_folder(program: Program) -> str:
    """Where the code is unpacked on the host, below ~/.drumline."""
    return working_copy(program.job_id, program.archive_sha)


def working_copy(job_id: str, sha: str | None) -> str:
    """Where the code of an archive is unpacked for a job, below ~/.drumline."""
    return f"work/{_safe(job_id)}/{(sha or 'empty')[:12]}"


def _safe(name: str) -> str:
    """A name as one part of a path, whatever is in it."""
    return quote(name, safe="").replace(".", "%2E")


def program_message(program: Program, place: HostRank) -> bytes:
    """The program as the agent takes it; secrets apart, for a file of their own."""
    container = f"drumline-{_safe(program.job_id)}-{program.attempt}".replace("%", "_")
    variables = {
        "DRUMLINE_JOB_ID": program.job_id,
        "DRUMLINE_ATTEMPT": str(program.attempt),
        "DRUMLINE_HOST": str(place.rank or 0),
        "DRUMLINE_HOSTS": str(place.ranks),
        "DRUMLINE_ACCELERATOR": program.accelerator,
        "DRUMLINE_CONTAINER": container,
    }
    described = {
        "run": program.run,
        "environment": dict(program.environment),
        "variables": variables,
        "checkpoint": program.checkpoint,
        "work": work_folder(program),
        "wrap": list(program.wrap),
    }
    message = {
        "program": described,
        "secrets": dict(program.secrets),
        "archive": program.archive_sha if program.archive is not None else None,
    }
    return json.dumps(message).encode()
