"""Compare a measured step with an estimate, and describe a profile in at most ten sentences.

The estimate is a JSON file with `seconds`, `compute_seconds`, `communication` (a list of `kind`,
`source`, `seconds`, `exposed_seconds`) and `operations` (a list of `name`, `kind`, `source`,
`seconds` of all `count` runs). Source lines are compared by file name and line number, because the
two may come from different folders.
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

ESTIMATE_COMMAND = "drumline inspect MODULE:FUNCTION --on SLICE --json"


@dataclass(frozen=True)
class EstimatedStep:
    """The estimated times of a step, in seconds."""

    seconds: float
    computing: float
    exposed: Mapping[tuple[str, str], float]
    """Exposed time by collective kind and line."""
    lines: Mapping[str, float]
    """Computation time by line."""


@dataclass(frozen=True)
class ProfileDifference:
    """The measured and estimated seconds of a component of a step."""

    subject: str
    source: str
    measured: float
    estimated: float

    @property
    def seconds(self) -> float:
        """The measured minus the estimated time."""
        return self.measured - self.estimated

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "what": self.subject,
            "source": self.source,
            "measured_seconds": self.measured,
            "estimated_seconds": self.estimated,
            "difference_seconds": self.seconds,
        }


@dataclass(frozen=True)
class ProfileComparison:
    """A measured step and its estimate."""

    total: ProfileDifference
    parts: tuple[ProfileDifference, ...]
    """The kinds and lines, by descending difference."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {**self.total.to_dict(), "parts": [part.to_dict() for part in self.parts]}


def short_source(source: str) -> str:
    """Return a source line without folders: `block.py:88`."""
    return source.replace("\\", "/").rpartition("/")[2]


def read_estimate(file: Path) -> EstimatedStep:
    """Read an estimate from a JSON file.

    Raises:
        UserError: the file cannot be read or is not an estimate.
    """
    hint = f"write it with {ESTIMATE_COMMAND}"
    try:
        content = json.loads(file.read_text())
    except OSError as error:
        raise UserError(f"--estimate {file} cannot be read ({error.strerror}); {hint}") from None
    except (ValueError, RecursionError):
        raise UserError(f"--estimate {file} is no JSON; {hint}") from None
    try:
        return _parse_estimate(content)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"--estimate {file} is not an estimate of a step: {reason}; {hint}"
        ) from None


def _parse_estimate(content: Any) -> EstimatedStep:
    if not isinstance(content, dict):
        raise TypeError("it holds no object")
    # The command prints the communication and the estimate.
    content = content.get("estimate", content)
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    for collective in content["communication"]:
        key = str(collective["kind"]), short_source(str(collective["source"] or ""))
        exposed[key] += float(collective["exposed_seconds"])
    lines: dict[str, float] = defaultdict(float)
    for op in content["operations"]:
        lines[short_source(str(op["source"] or ""))] += float(op["seconds"])
    seconds, computing = float(content["seconds"]), float(content["compute_seconds"])
    return EstimatedStep(seconds, computing, exposed, lines)


def compare_profile(profile: Profile, estimate: EstimatedStep) -> ProfileComparison:
    """Compare a profile with an estimate, in total and by kind and line."""
    exposed: dict[tuple[str, str], float] = defaultdict(float)
    for collective in profile.communication:
        exposed[collective.kind, short_source(collective.source)] += collective.exposed
    lines: dict[str, float] = defaultdict(float)
    for op in profile.operations:
        lines[short_source(op.source)] += op.seconds
    parts = []
    for kind, line in _union(exposed, estimate.exposed):
        estimated = estimate.exposed.get((kind, line), 0.0)
        parts.append(ProfileDifference(f"wait for {kind}", line, exposed[kind, line], estimated))
    for line in _union(lines, estimate.lines):
        estimated = estimate.lines.get(line, 0.0)
        parts.append(ProfileDifference("computation", line, lines[line], estimated))
    parts.append(ProfileDifference("nothing runs", "", profile.idle, 0.0))
    parts = [part for part in parts if part.measured or part.estimated]
    return ProfileComparison(
        ProfileDifference("step", "", profile.seconds, estimate.seconds),
        tuple(sorted(parts, key=lambda part: -abs(part.seconds))),
    )


def _union(first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys([*first, *second]))


# Summary ------------------------------------------------------------------------------------------

MAX_LINES = 10
MIN_SHARE = 0.02
"""The minimum share of a step to report. Smaller shares are within the noise between runs."""
UNEVEN = 0.1
"""The minimum difference between devices to report, as a share of the step."""
MAX_COLLECTIVES = 3
MAX_DIFFERENCES = 2
MOVEMENTS = ("copy", "transpose", "slice", "concatenate", "pad", "reshape", "data formatting")


def summarize(profile: Profile, comparison: ProfileComparison | None = None) -> list[str]:
    """Summarize a profile in at most ten sentences, by importance."""
    sentences = [
        *_step_sentence(profile),
        *_wait_sentences(profile),
        *_hidden_sentence(profile),
        *_idle_sentence(profile),
        *_largest_sentence(profile),
        *_movement_sentences(profile),
        *_uneven_sentence(profile),
    ]
    final = _difference_sentences(comparison) if comparison else []
    if profile.platform == "CPU" and len(profile.devices) > 1:
        final.append(
            "emulated devices share the machine's cores: trust the order of these figures, "
            "not their size"
        )
    return sentences[: MAX_LINES - len(final)] + final


def format_percent(seconds: float, total: float) -> str:
    """Format a share as a percentage, or as a dash if the total is 0."""
    return f"{100 * seconds / total:.0f} %" if total else "–"


def format_duration(seconds: float) -> str:
    """Format a duration, which may be negative, with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= 0.9995 * size:
            value = seconds / size
            return f"{value:,.0f} {unit}" if abs(value) >= 99.95 else f"{value:.3g} {unit}"
    return f"{seconds / 1e-9:.0f} ns" if seconds else "0"


def _at(source: str) -> str:
    return f" at {short_source(source)}" if source else ""


def _step_sentence(profile: Profile) -> list[str]:
    seconds = profile.seconds
    return [
        f"a step takes {format_duration(seconds)}: "
        f"{format_percent(profile.computing, seconds)} computes, "
        f"{format_percent(profile.exposed, seconds)} waits for communication, "
        f"{format_percent(profile.idle, seconds)} runs nothing"
    ]


def _wait_sentences(profile: Profile) -> list[str]:
    seconds = profile.seconds
    sentences = []
    for collective in profile.communication[:MAX_COLLECTIVES]:
        if collective.exposed < MIN_SHARE * seconds:
            continue
        saving = profile.saving(collective)
        advice = (
            f"overlapping it would save up to {format_percent(saving, seconds)}"
            if saving >= MIN_SHARE * seconds
            else "no computation is left to hide it behind: send less"
        )
        share = format_percent(collective.exposed, seconds)
        sentences.append(
            f"{share} of the time waits for {collective.kind}{_at(collective.source)}; {advice}"
        )
    return sentences


def _hidden_sentence(profile: Profile) -> list[str]:
    if profile.hidden < MIN_SHARE * profile.seconds:
        return []
    share = format_percent(profile.hidden, profile.exposed + profile.hidden)
    return [
        f"{share} of the communication ({format_duration(profile.hidden)}) "
        "is hidden behind computation"
    ]


def _idle_sentence(profile: Profile) -> list[str]:
    if profile.idle < 2 * MIN_SHARE * profile.seconds:
        return []
    return [
        f"{format_percent(profile.idle, profile.seconds)} of the time the device has nothing to "
        "run: look for the host between steps (input, Python, transfers, block_until_ready)"
    ]


def _largest_sentence(profile: Profile) -> list[str]:
    op = next((op for op in profile.operations if op.role is not Role.TRANSFER), None)
    if op is None:
        return []
    share = format_percent(op.seconds, profile.seconds)
    runs = f"{op.count:,.3g} run{'' if op.count == 1 else 's'}"
    return [f"the largest operation is {_describe_operation(op)}: {share} of the time in {runs}"]


def _describe_operation(op: MeasuredOperation) -> str:
    kind = f" ({op.kind})" if op.kind not in ("", op.name) else ""
    return f"{op.name}{kind}{_at(op.source)}"


def _movement_sentences(profile: Profile) -> list[str]:
    sentences = []
    moving = sum(op.seconds for op in profile.operations if op.kind.startswith(MOVEMENTS))
    if moving >= 2 * MIN_SHARE * profile.seconds:
        sentences.append(
            f"{format_percent(moving, profile.seconds)} only moves data (copies, transposes, "
            "slices): look at layouts and donated buffers"
        )
    transfers = sum(op.seconds for op in profile.operations if op.role is Role.TRANSFER)
    if transfers >= MIN_SHARE * profile.seconds:
        sentences.append(
            f"{format_percent(transfers, profile.seconds)} are copies to or from the host: keep "
            "the data on the device, or fetch it while a step runs"
        )
    return sentences


def _uneven_sentence(profile: Profile) -> list[str]:
    shares = [device.computing / device.span for device in profile.devices if device.span]
    if len(shares) < 2 or max(shares) - min(shares) < UNEVEN:
        return []
    slowest = max(profile.devices, key=lambda device: device.computing)
    return [
        f"the devices compute from {100 * min(shares):.0f} to {100 * max(shares):.0f} % of the "
        f"time: the others wait for {slowest.name}"
    ]


def _difference_sentences(comparison: ProfileComparison) -> list[str]:
    total = comparison.total
    ratio = f", {total.measured / total.estimated:.2f} times" if total.estimated else ""
    sentences = [
        f"measured {format_duration(total.measured)} a step where "
        f"{format_duration(total.estimated)} were estimated{ratio}"
    ]
    for part in comparison.parts[:MAX_DIFFERENCES]:
        if abs(part.seconds) < MIN_SHARE * total.measured:
            continue
        direction = "more" if part.seconds > 0 else "less"
        sentences.append(
            f"{part.subject}{_at(part.source)}: {format_duration(abs(part.seconds))} {direction} "
            f"than estimated ({format_duration(part.measured)} against "
            f"{format_duration(part.estimated)})"
        )
    return sentences
