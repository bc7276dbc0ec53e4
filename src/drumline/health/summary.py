"""From findings and times to the report: verdicts, rates and shares, accusations. Pure."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import median

from drumline.chips.catalogue import device_kind
from drumline.health.accusation import Accusation
from drumline.health.checks.devices import Device
from drumline.health.judging import LEAST_SHARE, UNJUDGED, Finding, slow_chips
from drumline.health.observations import Observation
from drumline.health.report import (
    FAIL,
    PASS,
    WARN,
    BurnIn,
    CheckOutcome,
    ChipHealth,
    HostHealth,
    worst,
)

TESTS = ("matmul_bf16", "matmul_int8", "functions", "memory", "links")
NOT_RUN = "not run: a bad chip was found before"
TIMED = ("matmul_bf16", "matmul_int8", "memory")
"""Tests in which every run is the same work, on each chip for itself, and long enough to judge."""


@dataclass
class RunTimes:
    """The runs of one test."""

    runs: list[Mapping[int, float]] = field(default_factory=list)
    """Those by which the speed is judged: all of them do the same work."""
    others: list[Mapping[int, float]] = field(default_factory=list)
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, seen: Observation) -> None:
        """Count one run in."""
        if seen.flops or seen.bytes:
            self.runs.append(seen.seconds)
            self.flops, self.bytes = seen.flops, seen.bytes
        elif seen.seconds:
            self.others.append(seen.seconds)

    def of(self, device: int) -> list[float]:
        """The seconds of each run on one device."""
        return [run[device] for run in self.runs if device in run]

    def all(self, device: int) -> float:
        """The seconds of all that was run on it."""
        return sum(run.get(device, 0.0) for run in (*self.runs, *self.others))


def summarise(
    devices: Sequence[Device],
    hosts: Sequence[Mapping[str, CheckOutcome]],
    found: Sequence[Finding],
    times: Mapping[str, RunTimes],
    seconds: float,
) -> BurnIn:
    """The report, from what the hosts said of themselves and what was found on the chips."""
    chips = tuple(_chip(device, devices, found, times) for device in devices)
    machines = tuple(HostHealth(number, tests) for number, tests in enumerate(hosts))
    accusations = tuple(_accusations(devices, machines, found))
    verdict = worst([*(chip.verdict for chip in chips), *(host.verdict for host in machines)])
    verdict = FAIL if accusations else verdict
    said = _said(verdict, chips, machines, accusations)
    return BurnIn(verdict, said, seconds, chips, machines, accusations)


def _chip(
    device: Device,
    devices: Sequence[Device],
    found: Sequence[Finding],
    times: Mapping[str, RunTimes],
) -> ChipHealth:
    tests = {}
    known = any(finding.device is not None and finding.verdict == FAIL for finding in found)
    for test in TESTS:
        if test == "links" and len(devices) == 1:
            tests[test] = CheckOutcome(said="skipped: there is one device")
            continue
        outcome = _rates(test, device, times.get(test, RunTimes()))
        peers = {other.id for other in devices if other.kind == device.kind}
        warned = _speed(test, device, peers, times.get(test, RunTimes()), outcome)
        mine = [finding for finding in found if finding.test == test]
        blamed = [finding for finding in mine if finding.device == device.id]
        # What one bad chip does to all others in a collective is no news once it is known.
        shared = [] if known else [finding for finding in mine if device.id in finding.among]
        if blamed:
            first = max(blamed, key=lambda finding: finding.verdict == FAIL)
            outcome = replace(outcome, verdict=first.verdict, said=first.why)
        elif shared:
            said = f"not known which chip: {shared[0].why}"
            outcome = replace(outcome, verdict=WARN, said=said)
        elif warned:
            outcome = replace(outcome, verdict=WARN, said=warned)
        tests[test] = outcome
    return ChipHealth(device.host, tests, device.id, device.kind)


def _rates(test: str, device: Device, times: RunTimes) -> CheckOutcome:
    """How long a test took on a chip, and how near that is to what the catalogue says."""
    runs = times.of(device.id)
    if not times.all(device.id):
        return CheckOutcome(said=NOT_RUN)
    outcome = CheckOutcome(seconds=times.all(device.id))
    if not runs:
        return outcome
    kind = device_kind(device.kind)
    share = 1 / kind.devices_per_chip if kind else 0.0
    if times.flops:
        peak = None
        if kind:
            peak = kind.chip.peak_bf16_flops if test == "matmul_bf16" else kind.chip.peak_8bit_flops
        rate = times.flops / median(runs) / 1e12
        top = peak * share / 1e12 if peak else None
        return replace(outcome, tflops=rate, peak=top, share=rate / top if top else None)
    if times.bytes:
        rate = times.bytes / median(runs) / 1e9
        # A hop of a ring is not one link where the torus has none from end to end: no share.
        top = kind.chip.hbm_bandwidth * share / 1e9 if kind and test == "memory" else None
        return replace(outcome, gb_per_s=rate, peak=top, share=rate / top if top else None)
    return outcome


def _speed(
    test: str, device: Device, peers: Set[int], times: RunTimes, outcome: CheckOutcome
) -> str:
    """What is to be said of a chip's speed; nothing as a rule."""
    name = test.replace("_", " ")
    if test in TIMED:
        runs = [{d: taken for d, taken in run.items() if d in peers} for run in times.runs]
        factor = slow_chips(runs, device.platform).get(device.id)
        if factor is not None:
            return f"{name}: takes {factor:.2f} times as long as the other chips"
    judged = (device.platform, test) not in UNJUDGED
    least = LEAST_SHARE.get(device.platform, 0.0) if judged else 0.0
    if outcome.share is not None and outcome.share < least:
        rate, unit = (outcome.tflops, "TFLOP/s") if outcome.tflops else (outcome.gb_per_s, "GB/s")
        return f"{name}: {rate:,.0f} of {outcome.peak:,.0f} {unit}, under {least:.0%}"
    return ""


def _accusations(
    devices: Sequence[Device], hosts: Iterable[HostHealth], found: Sequence[Finding]
) -> list[Accusation]:
    """One for each bad chip; for a host, or for the slice, only what no chip explains."""
    host_of = {device.id: device.host for device in devices}
    failed = [finding for finding in found if finding.verdict == FAIL]
    named: dict[int, list[Finding]] = {}
    for finding in failed:
        if finding.device is not None:
            named.setdefault(finding.device, []).append(finding)
    accusations = []
    for chip, theirs in sorted(named.items()):
        more = len(theirs) - 1
        also = f" (and {more} more finding{'s' if more > 1 else ''})" if more else ""
        accusations.append(Accusation(theirs[0].why + also, host_of[chip], chip))
    for host in hosts:
        reasons = [test.said for test in host.tests.values() if test.verdict == FAIL]
        if reasons:
            accusations.append(Accusation("; ".join(reasons), host.host))
    if not accusations and failed:
        suspects = {host_of[chip] for chip in failed[0].among}
        alone = suspects.pop() if len(suspects) == 1 else None
        accusations.append(Accusation(failed[0].why, alone))
    return accusations


def _said(
    verdict: str,
    chips: Sequence[ChipHealth],
    hosts: Sequence[HostHealth],
    accusations: Sequence[Accusation],
) -> str:
    counted = f"{_count(len(chips), 'chip')} on {_count(len(hosts), 'host')}"
    if verdict == FAIL:
        more = len(accusations) - 1
        also = f", and {more} more" if more else ""
        return accusations[0].sentence.removeprefix("drumline: ") + also
    if verdict == PASS:
        return f"{counted}: nothing wrong was found"
    places = [(f"chip {chip.id}", chip.tests) for chip in chips]
    places += [(f"host {host.host}", host.tests) for host in hosts]
    warnings = [
        f"{who}: {test.said}"
        for who, tests in places
        for test in tests.values()
        if test.verdict == WARN
    ]
    more = len(warnings) - 1
    also = f", and {_count(more, 'more warning')}" if more else ""
    return f"{counted} compute right, but {warnings[0]}{also}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
