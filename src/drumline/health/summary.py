"""Build the report of a burn-in from its findings and timings. Pure functions."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from statistics import median

from drumline.chips.catalogue import device_kind
from drumline.health.fault_report import FaultReport
from drumline.health.findings import (
    MIN_SHARE,
    UNJUDGED_SHARES,
    Finding,
    Observation,
    find_slow_chips,
)
from drumline.health.host_checks import Device
from drumline.health.report import (
    FAIL,
    PASS,
    WARN,
    CheckOutcome,
    ChipHealth,
    HealthReport,
    HostHealth,
    worst,
)

TESTS = ("matmul_bf16", "matmul_int8", "functions", "memory", "links")
NOT_RUN = "not run: a bad chip was found before"
TIMED_TESTS = ("matmul_bf16", "matmul_int8", "memory")
"""Tests with enough equal, independent work per chip to compare the speeds."""


@dataclass
class RunTimings:
    """The timings of a test."""

    comparable: list[Mapping[int, float]] = field(default_factory=list)
    """Seconds by device, for the runs with equal work, which determine the speed."""
    incomparable: list[Mapping[int, float]] = field(default_factory=list)
    flops: float = 0.0
    bytes: float = 0.0

    def add(self, observation: Observation) -> None:
        """Add a run."""
        if observation.flops or observation.bytes:
            self.comparable.append(observation.seconds)
            self.flops, self.bytes = observation.flops, observation.bytes
        elif observation.seconds:
            self.incomparable.append(observation.seconds)

    def run_seconds(self, device: int) -> list[float]:
        """Return the seconds of the comparable runs on a device."""
        return [run[device] for run in self.comparable if device in run]

    def total_seconds(self, device: int) -> float:
        """Return the seconds of all runs on a device."""
        return sum(run.get(device, 0.0) for run in (*self.comparable, *self.incomparable))


def build_report(
    devices: Sequence[Device],
    host_outcomes: Sequence[Mapping[str, CheckOutcome]],
    findings: Sequence[Finding],
    timings: Mapping[str, RunTimings],
    seconds: float,
) -> HealthReport:
    """Build the report from the hosts' own checks and the findings and timings of the chips."""
    chips = tuple(_chip_health(device, devices, findings, timings) for device in devices)
    hosts = tuple(HostHealth(index, outcomes) for index, outcomes in enumerate(host_outcomes))
    faults = tuple(_fault_reports(devices, hosts, findings))
    verdict = worst([*(chip.verdict for chip in chips), *(host.verdict for host in hosts)])
    verdict = FAIL if faults else verdict
    return HealthReport(
        verdict, _message(verdict, chips, hosts, faults), seconds, chips, hosts, faults
    )


def _chip_health(
    device: Device,
    devices: Sequence[Device],
    findings: Sequence[Finding],
    timings: Mapping[str, RunTimings],
) -> ChipHealth:
    outcomes = {}
    bad_chip_is_known = any(f.device is not None and f.verdict == FAIL for f in findings)
    for test in TESTS:
        if test == "links" and len(devices) == 1:
            outcomes[test] = CheckOutcome(message="skipped: there is one device")
            continue
        test_times = timings.get(test, RunTimings())
        outcome = _measured_outcome(test, device, test_times)
        peers = {other.id for other in devices if other.kind == device.kind}
        slowness = _slowness(test, device, peers, test_times, outcome)
        of_test = [finding for finding in findings if finding.test == test]
        of_chip = [finding for finding in of_test if finding.device == device.id]
        # A known bad chip explains bad collectives.
        shared = [] if bad_chip_is_known else [f for f in of_test if device.id in f.suspects]
        if of_chip:
            first = max(of_chip, key=lambda finding: finding.verdict == FAIL)
            outcome = replace(outcome, verdict=first.verdict, message=first.reason)
        elif shared:
            message = f"the bad chip is unknown: {shared[0].reason}"
            outcome = replace(outcome, verdict=WARN, message=message)
        elif slowness:
            outcome = replace(outcome, verdict=WARN, message=slowness)
        outcomes[test] = outcome
    return ChipHealth(device.host, outcomes, device.id, device.kind)


def _measured_outcome(test: str, device: Device, timings: RunTimings) -> CheckOutcome:
    """Return a passed outcome with time, rate and share of the peak."""
    runs = timings.run_seconds(device.id)
    if not timings.total_seconds(device.id):
        return CheckOutcome(message=NOT_RUN)
    outcome = CheckOutcome(seconds=timings.total_seconds(device.id))
    if not runs:
        return outcome
    catalogue_entry = device_kind(device.kind)
    device_share = 1 / catalogue_entry.devices_per_chip if catalogue_entry else 0.0
    if timings.flops:
        chip_peak = None
        if catalogue_entry and test == "matmul_bf16":
            chip_peak = catalogue_entry.chip.peak_bf16_flops
        elif catalogue_entry:
            chip_peak = catalogue_entry.chip.peak_int8_flops
        rate = timings.flops / median(runs) / 1e12
        peak = chip_peak * device_share / 1e12 if chip_peak else None
        return replace(outcome, tflops=rate, peak=peak, share=rate / peak if peak else None)
    if timings.bytes:
        rate = timings.bytes / median(runs) / 1e9
        # A hop may take more than one link, so links have no share.
        peak = None
        if catalogue_entry and test == "memory":
            peak = catalogue_entry.chip.hbm_bandwidth * device_share / 1e9
        return replace(outcome, gb_per_s=rate, peak=peak, share=rate / peak if peak else None)
    return outcome


def _slowness(
    test: str, device: Device, peers: Set[int], timings: RunTimings, outcome: CheckOutcome
) -> str:
    """Return a message if a chip is slow, else an empty string."""
    name = test.replace("_", " ")
    if test in TIMED_TESTS:
        runs = [
            {d: seconds for d, seconds in run.items() if d in peers} for run in timings.comparable
        ]
        factor = find_slow_chips(runs, device.platform).get(device.id)
        if factor is not None:
            return f"{name}: takes {factor:.2f} times as long as the other chips"
    is_judged = (device.platform, test) not in UNJUDGED_SHARES
    min_share = MIN_SHARE.get(device.platform, 0.0) if is_judged else 0.0
    if outcome.share is not None and outcome.share < min_share:
        rate, unit = (outcome.tflops, "TFLOP/s") if outcome.tflops else (outcome.gb_per_s, "GB/s")
        return f"{name}: {rate:,.0f} of {outcome.peak:,.0f} {unit}, under {min_share:.0%}"
    return ""


def _fault_reports(
    devices: Sequence[Device], hosts: Iterable[HostHealth], findings: Sequence[Finding]
) -> list[FaultReport]:
    """Return the reports of the bad chips and hosts.

    If no chip or host is certain, return a report for the suspects' host, or for the slice.
    """
    host_of = {device.id: device.host for device in devices}
    failed = [finding for finding in findings if finding.verdict == FAIL]
    by_chip: dict[int, list[Finding]] = {}
    for finding in failed:
        if finding.device is not None:
            by_chip.setdefault(finding.device, []).append(finding)
    reports = []
    for chip, chip_findings in sorted(by_chip.items()):
        extra_count = len(chip_findings) - 1
        suffix = (
            f" (and {extra_count} more finding{'s' if extra_count > 1 else ''})"
            if extra_count
            else ""
        )
        reports.append(FaultReport(chip_findings[0].reason + suffix, host_of[chip], chip))
    for host in hosts:
        reasons = [test.message for test in host.tests.values() if test.verdict == FAIL]
        if reasons:
            reports.append(FaultReport("; ".join(reasons), host.host))
    if not reports and failed:
        suspect_hosts = {host_of[chip] for chip in failed[0].suspects}
        host_index = suspect_hosts.pop() if len(suspect_hosts) == 1 else None
        reports.append(FaultReport(failed[0].reason, host_index))
    return reports


def _message(
    verdict: str,
    chips: Sequence[ChipHealth],
    hosts: Sequence[HostHealth],
    faults: Sequence[FaultReport],
) -> str:
    counts = f"{_plural(len(chips), 'chip')} on {_plural(len(hosts), 'host')}"
    if verdict == FAIL:
        extra_count = len(faults) - 1
        suffix = f", and {extra_count} more" if extra_count else ""
        return faults[0].sentence.removeprefix("drumline: ") + suffix
    if verdict == PASS:
        return f"{counts}: no faults found"
    hardware = [(f"chip {chip.id}", chip.tests) for chip in chips]
    hardware += [(f"host {host.host}", host.tests) for host in hosts]
    warnings = [
        f"{name}: {test.message}"
        for name, tests in hardware
        for test in tests.values()
        if test.verdict == WARN
    ]
    extra_count = len(warnings) - 1
    suffix = f", and {_plural(extra_count, 'more warning')}" if extra_count else ""
    return f"{counts} compute correctly, but {warnings[0]}{suffix}"


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")
