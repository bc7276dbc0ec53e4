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
from drumline.inspect.profiles.attribution import MeasuredOperation, Profile
from drumline.inspect.profiles.reading import Role

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


MOST_LINES = 10
WORTH_SAYING = 0.02
"""Of a step; less than that is within what one run differs from the next."""
UNEVEN = 0.1
MOST_COLLECTIVES = 3
MOST_DIFFERENCES = 2
MOVEMENTS = ("copy", "transpose", "slice", "concatenate", "pad", "reshape", "data formatting")


def summary(profile: Profile, comparison: ProfileComparison | None = None) -> list[str]:
    """What the measured time says, the most important first."""
    lines = [_whole(profile), *_waits(profile), *_hidden(profile), *_idle(profile)]
    lines += [*_largest(profile), *_movement(profile), *_uneven(profile)]
    told = _parting(comparison) if comparison else []
    if profile.platform == "CPU" and len(profile.devices) > 1:
        told.append(
            "emulated devices share the machine's cores: trust the order of these figures, "
            "not their size"
        )
    return lines[: MOST_LINES - len(told)] + told


def percent(part: float, whole: float) -> str:
    """A share as one reads it."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


def duration(seconds: float) -> str:
    """A time with three figures."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            value = seconds / size
            return f"{value:,.0f} {unit}" if abs(value) >= 99.95 else f"{value:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns" if seconds else "0"


def place(source: str) -> str:
    """Where it stands, for a sentence; nothing where it is not known."""
    return f" at {short_source(source)}" if source else ""


def _whole(profile: Profile) -> str:
    whole = profile.seconds
    return (
        f"a step takes {duration(whole)}: {percent(profile.computing, whole)} computes, "
        f"{percent(profile.exposed, whole)} waits for communication, "
        f"{percent(profile.idle, whole)} runs nothing"
    )


def _waits(profile: Profile) -> list[str]:
    whole = profile.seconds
    lines = []
    for each in profile.communication[:MOST_COLLECTIVES]:
        if each.exposed < WORTH_SAYING * whole:
            continue
        saving = profile.saving(each)
        advice = (
            f"overlapping it would save up to {percent(saving, whole)}"
            if saving >= WORTH_SAYING * whole
            else "no computation is left to hide it behind: send less"
        )
        lines.append(
            f"{percent(each.exposed, whole)} of the time waits for {each.kind}"
            f"{place(each.source)}; {advice}"
        )
    return lines


def _hidden(profile: Profile) -> list[str]:
    running = profile.exposed + profile.hidden
    if profile.hidden < WORTH_SAYING * profile.seconds:
        return []
    return [
        f"{percent(profile.hidden, running)} of the communication ({duration(profile.hidden)}) "
        "is hidden behind computation"
    ]


def _idle(profile: Profile) -> list[str]:
    if profile.idle < 2 * WORTH_SAYING * profile.seconds:
        return []
    return [
        f"{percent(profile.idle, profile.seconds)} of the time the device has nothing to run: "
        "look for the host between steps (input, Python, transfers, block_until_ready)"
    ]


def _largest(profile: Profile) -> list[str]:
    computed = [each for each in profile.operations if each.role is not Role.TRANSFER]
    if not computed:
        return []
    each = computed[0]
    return [
        f"the largest operation is {_named(each)}: {percent(each.seconds, profile.seconds)} of "
        f"the time in {each.count:,.3g} run{'' if each.count == 1 else 's'}"
    ]


def _named(operation: MeasuredOperation) -> str:
    known = operation.kind if operation.kind != operation.name else ""
    return f"{operation.name}{f' ({known})' if known else ''}{place(operation.source)}"


def _movement(profile: Profile) -> list[str]:
    lines = []
    moving = sum(each.seconds for each in profile.operations if each.kind.startswith(MOVEMENTS))
    if moving >= 2 * WORTH_SAYING * profile.seconds:
        lines.append(
            f"{percent(moving, profile.seconds)} only moves data (copies, transposes, slices): "
            "look at layouts and donated buffers"
        )
    sent = sum(each.seconds for each in profile.operations if each.role is Role.TRANSFER)
    if sent >= WORTH_SAYING * profile.seconds:
        lines.append(
            f"{percent(sent, profile.seconds)} are copies to or from the host: keep the data on "
            "the device, or fetch it while a step runs"
        )
    return lines


def _uneven(profile: Profile) -> list[str]:
    shares = [device.computing / device.span for device in profile.devices if device.span]
    if len(shares) < 2 or max(shares) - min(shares) < UNEVEN:
        return []
    slowest = max(profile.devices, key=lambda device: device.computing)
    return [
        f"the devices compute from {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the "
        f"time: the others wait for {slowest.name}"
    ]


def _parting(comparison: ProfileComparison) -> list[str]:
    whole = comparison.whole
    ratio = f", {whole.measured / whole.estimated:.2f} times" if whole.estimated else ""
    lines = [
        f"measured {duration(whole.measured)} a step where {duration(whole.estimated)} were "
        f"estimated{ratio}"
    ]
    for part in comparison.parts[:MOST_DIFFERENCES]:
        if abs(part.seconds) < WORTH_SAYING * whole.measured:
            continue
        more = "more" if part.seconds > 0 else "less"
        lines.append(
            f"{part.what}{place(part.source)}: {duration(abs(part.seconds))} {more} than estimated "
            f"({duration(part.measured)} against {duration(part.estimated)})"
        )
    return lines
