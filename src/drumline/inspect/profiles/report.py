"""The sentences that a researcher acts on: at most ten about a profile."""

from drumline.inspect.profiles.attribution import MeasuredOperation, Profile
from drumline.inspect.profiles.comparison import ProfileComparison, short_source
from drumline.inspect.profiles.operations import Role

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
