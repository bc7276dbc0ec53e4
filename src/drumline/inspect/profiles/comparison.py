"""Sets a measured step beside an estimated one, and says where the two part.

The estimate is a JSON file with `seconds`, `compute_seconds`, `communication` (a list of `kind`,
`source`, `seconds`, `exposed_seconds`) and `operations` (a list of `name`, `kind`, `source`,
`seconds` of all its `count` runs). A line of the program is known by the file's name and the number
alone, as one of the two may have been made in another folder.
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.errors import UserError
from drumline.inspect.profiles.attribution import Profile

WRITER = "drumline inspect MODULE:FUNCTION --on SLICE --json"


@dataclass(frozen=True)
class EstimatedStep:
    """What an estimate says of a step, in seconds."""

    seconds: float
    computing: float
    exposed: Mapping[tuple[str, str], float]
    """Of each kind of collective and line."""
    lines: Mapping[str, float]
    """Of the computations on each line."""


@dataclass(frozen=True)
class ProfileDifference:
    """What was measured and estimated of one thing, in seconds of a step."""

    what: str
    source: str
    measured: float
    estimated: float

    @property
    def seconds(self) -> float:
        """How much longer it took than was estimated."""
        return self.measured - self.estimated

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "what": self.what,
            "source": self.source,
            "measured_seconds": self.measured,
            "estimated_seconds": self.estimated,
            "difference_seconds": self.seconds,
        }


@dataclass(frozen=True)
class ProfileComparison:
    """A measured step beside an estimated one."""

    whole: ProfileDifference
    parts: tuple[ProfileDifference, ...]
    """The kinds and lines, the one that differs most first."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**self.whole.to_dict(), "parts": [part.to_dict() for part in self.parts]}


def short_source(source: str) -> str:
    """A line by the file's name alone: `block.py:88`."""
    return source.replace("\\", "/").rpartition("/")[2]


def read_estimate(file: Path) -> EstimatedStep:
    """The estimate in a JSON file."""
    try:
        content = json.loads(file.read_text())
    except OSError as problem:
        raise UserError(
            f"--estimate {file} cannot be read ({problem.strerror}); write it with {WRITER}"
        ) from None
    except (ValueError, RecursionError):
        raise UserError(f"--estimate {file} is no JSON; write it with {WRITER}") from None
    try:
        return _estimate(content)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        missing = f"{problem} is missing" if isinstance(problem, KeyError) else str(problem)
        raise UserError(
            f"--estimate {file} is no estimate of a step: {missing}; write it with {WRITER}"
        ) from None


def _estimate(content: Any) -> EstimatedStep:
    if not isinstance(content, dict):
        raise TypeError("it holds no object")
    # The command prints the estimate beside the communication.
    content = content.get("estimate", content)
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    for each in content["communication"]:
        exposed[str(each["kind"]), short_source(str(each["source"] or ""))] += float(
            each["exposed_seconds"]
        )
    lines: dict[str, float] = defaultdict(float)
    for each in content["operations"]:
        lines[short_source(str(each["source"] or ""))] += float(each["seconds"])
    return EstimatedStep(
        float(content["seconds"]), float(content["compute_seconds"]), exposed, lines
    )


def compare(profile: Profile, estimate: EstimatedStep) -> ProfileComparison:
    """By how much the two part, over all and at which kinds and lines."""
    waits: dict[tuple[str, str], float] = defaultdict(float)
    for collective in profile.communication:
        waits[collective.kind, short_source(collective.source)] += collective.exposed
    expected = estimate.exposed
    lines: dict[str, float] = defaultdict(float)
    for operation in profile.operations:
        lines[short_source(operation.source)] += operation.seconds
    parts = [
        ProfileDifference(
            f"wait for {kind}", line, waits[kind, line], expected.get((kind, line), 0.0)
        )
        for kind, line in _both(waits, expected)
    ]
    parts += [
        ProfileDifference("computation", line, lines[line], estimate.lines.get(line, 0.0))
        for line in _both(lines, estimate.lines)
    ]
    parts.append(ProfileDifference("nothing runs", "", profile.idle, 0.0))
    parts = [part for part in parts if part.measured or part.estimated]
    return ProfileComparison(
        ProfileDifference("step", "", profile.seconds, estimate.seconds),
        tuple(sorted(parts, key=lambda part: -abs(part.seconds))),
    )


def _both(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys([*first, *second]))
