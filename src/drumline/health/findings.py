"""Find faults in the observations of a burn-in, and the faulty chips. Pure functions.

Only incorrect values fail. A slow chip is a warning, because a busy host or a warm room also slows
it down. A finding names a chip only if it is certain.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import MappingProxyType
from typing import Any

from drumline.health.replicas import compare_replicas
from drumline.health.report import FAIL, WARN

Value = tuple[int, ...]

SAME, ZERO, HOP, REDUCED = "same", "zero", "hop", "reduced"
"""The rules. `same`: the values of all chips are equal. The others: the number of mismatching
words, which is `values[0]`, is zero in memory, after a hop over a link, or after a collective."""

NO_KINDS: Mapping[int, str] = MappingProxyType({})
MAJORITY = 3
"""The chips needed for a majority vote."""
TPU_SLOWER, OTHER_SLOWER = 1.05, 1.10
"""Limits of a chip's slowdown. A TPU runs only the burn-in; the clock of a GPU depends on its
temperature and power."""
CPU_SLOWER = 4.0
"""The limit for emulated chips, which every run must exceed, because they share cores with other
programs. With eight chips on two busy cores, a chip was up to 30 times slower than its peers in a
single run, but at most 1.02 times slower in the fastest of six."""
CPU_RUNS = 6
MIN_SHARE = {"tpu": 0.70, "gpu": 0.55}
"""The minimum share of the catalogue's peak, by platform. A GPU lowers its clock at its power
limit. A healthy H200 reaches 72 % of its peak in long matmuls and 83 % of its bandwidth."""
UNJUDGED_SHARES = {("gpu", "matmul_int8")}
"""Tests that do not reach the peak on a healthy chip. XLA's int8 matmul reaches 44 % on an H200."""


@dataclass(frozen=True)
class Observation:
    """A run of a program on every chip."""

    test: str
    subject: str
    """Operation and inputs. Runs of a test and subject should have equal values."""
    run: int
    rule: str
    values: Mapping[int, Value]
    """The values by device."""
    seconds: Mapping[int, float] = field(default_factory=dict)
    flops: float = 0.0
    """The operations per chip within `seconds`."""
    bytes: float = 0.0
    expected: Value | None = None
    """The correct value, if the host knows it."""
    senders: Mapping[int, int] = field(default_factory=dict)
    """The sender by receiver, empty before the first hop."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values. Mappings become lists of pairs."""
        return {
            **vars(self),
            "values": [[device, *value] for device, value in self.values.items()],
            "seconds": list(self.seconds.items()),
            "senders": list(self.senders.items()),
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Observation":
        """Return the observation that `as_json` was called on."""
        return cls(
            **{
                **fields,
                "values": {device: tuple(value) for device, *value in fields["values"]},
                "seconds": dict(fields["seconds"]),
                "senders": dict(fields["senders"]),
                "expected": None if fields["expected"] is None else tuple(fields["expected"]),
            }
        )


def merge_hosts(observations: Iterable[Observation]) -> list[Observation]:
    """Merge the observations of a run by different hosts."""
    merged: dict[tuple[str, str, int], Observation] = {}
    for observation in observations:
        key = (observation.test, observation.subject, observation.run)
        first = merged.get(key)
        merged[key] = (
            observation
            if first is None
            else replace(
                first,
                values={**first.values, **observation.values},
                seconds={**first.seconds, **observation.seconds},
            )
        )
    return list(merged.values())


@dataclass(frozen=True)
class Finding:
    """A fault, with its chip if that is certain."""

    test: str
    reason: str
    device: int | None = None
    verdict: str = FAIL
    link: tuple[int, int] | None = None
    """The sender and the receiver, if the received buffer differs from the one sent."""
    suspects: tuple[int, ...] = ()
    """The chips that may be bad, if `device` is None."""


def find_faults(
    observations: Iterable[Observation], kinds: Mapping[int, str] = NO_KINDS
) -> list[Finding]:
    """Return all findings. Those of a chip and test are in the order of their runs.

    Args:
        observations: The observations of one or more rounds.
        kinds: The kinds of the chips, by default equal. Only chips of the same kind are compared,
            because a program may round differently on another.
    """
    subjects: dict[tuple[str, str], list[Observation]] = {}
    for observation in observations:
        subjects.setdefault((observation.test, observation.subject), []).append(observation)
    findings = []
    for group in subjects.values():
        runs = sorted(group, key=lambda observation: observation.run)
        if runs[0].rule == SAME:
            for runs_of_kind in _split_by_kind(runs, kinds):
                findings += _compare_values(runs_of_kind)
        elif runs[0].rule == ZERO:
            findings += _find_bad_memory(runs)
        elif runs[0].rule == HOP:
            findings += _find_bad_hops(runs)
        else:
            findings += _find_bad_collectives(runs)
    return findings


def _split_by_kind(
    runs: Sequence[Observation], kinds: Mapping[int, str]
) -> list[list[Observation]]:
    """Return a list of runs per kind of chip, with the values of those chips."""
    present = sorted({kinds.get(device, "") for run in runs for device in run.values})
    return [
        [
            replace(run, values={d: v for d, v in run.values.items() if kinds.get(d, "") == kind})
            for run in runs
        ]
        for kind in present
    ]


def _name(observation: Observation) -> str:
    """Return test and inputs without the round, such as `matmul bf16, near zero`."""
    return f"{observation.test.replace('_', ' ')}, {observation.subject.rpartition(', ')[0]}"


def _compare_values(observations: Sequence[Observation]) -> list[Finding]:
    test, name, expected = observations[0].test, _name(observations[0]), observations[0].expected
    devices = sorted({device for run in observations for device in run.values})
    if expected is not None and len(devices) < MAJORITY:
        return [
            Finding(
                test,
                f"{name}: checksum differs from numpy's in {_of_runs(count, observations)}",
                device,
            )
            for device in devices
            if (count := sum(run.values.get(device, expected) != expected for run in observations))
        ]
    comparison = compare_replicas([run.values for run in observations])
    if len(devices) > 2:
        others = f"the other {len(devices) - 1} chips"
    else:
        others = "the other chip" if len(devices) == 2 else "its own repeat"
    findings = [
        Finding(
            test,
            f"{name}: checksum differs from {others} in {_of_runs(count, observations)}",
            device,
        )
        for device, count in comparison.run_counts.items()
    ]
    for group in comparison.tied:
        chips = " and ".join(map(str, group))
        reason = f"{name}: chips {chips} differ, and none of them has a majority"
        findings.append(Finding(test, reason, suspects=group))
    if comparison.spread:
        reason = f"{name}: all chips agree, but the values differ from one run to another"
        findings.append(Finding(test, reason, suspects=tuple(devices)))
    if (
        not comparison
        and expected is not None
        and any(value != expected for value in observations[0].values.values())
    ):
        reason = f"{name}: all chips agree, but not with numpy: the compiler or all chips are wrong"
        findings += [Finding(test, reason, device, WARN) for device in devices]
    return findings


def _of_runs(count: int, runs: Sequence[Observation]) -> str:
    return f"{count} of {len(runs)} runs"


def _count_words(count: int) -> str:
    return f"{count:,} word{'' if count == 1 else 's'}"


def _find_bad_memory(observations: Sequence[Observation]) -> list[Finding]:
    findings = []
    for observation in observations:
        for device, (mismatches, *_) in sorted(observation.values.items()):
            if mismatches:
                reason = (
                    f"{_name(observation)}: {_count_words(mismatches)} read back not as written"
                )
                findings.append(Finding(observation.test, reason, device))
    return findings


def _find_bad_hops(hops: Sequence[Observation]) -> list[Finding]:
    """Find the hops that damage a buffer. Later hops only pass it on."""
    findings = []
    previous: Mapping[int, Value] = {}
    for hop in hops:
        for device, (mismatches, *sums) in sorted(hop.values.items()):
            sender = hop.senders.get(device)
            if not mismatches:
                continue
            if sender is None:
                words = _count_words(mismatches)
                reason = f"links: {words} wrong in the buffer that the chip made to send"
                findings.append(Finding(hop.test, reason, device))
                continue
            sender_mismatches, *sender_sums = previous.get(sender, (0,))
            if sender_mismatches and sums == sender_sums:
                continue  # the sender's buffer was already damaged
            reason = (
                f"{_name(hop)}: the link {sender} → {device} delivered {_count_words(mismatches)} "
                f"not as sent, hop {hop.run}"
            )
            findings.append(Finding(hop.test, reason, device, link=(sender, device)))
        previous = hop.values
    return findings


def _find_bad_collectives(observations: Sequence[Observation]) -> list[Finding]:
    """Find collectives with bad results, and the bad chip if only a single result is bad."""
    findings = []
    for observation in observations:
        bad_chips = sorted(device for device, (count, *_) in observation.values.items() if count)
        if len(bad_chips) == 1:
            count = observation.values[bad_chips[0]][0]
            reason = f"{_name(observation)}: {_count_words(count)} wrong on this chip alone"
            findings.append(Finding(observation.test, reason, bad_chips[0]))
        elif bad_chips:
            total = len(observation.values)
            reason = f"{_name(observation)}: wrong on {len(bad_chips)} of {total} chips"
            findings.append(Finding(observation.test, reason, suspects=tuple(observation.values)))
    return findings


def find_slow_chips(runs: Sequence[Mapping[int, float]], platform: str) -> dict[int, float]:
    """Return the slowdown of chips that are slower than their peers.

    Args:
        runs: The seconds by device, for runs with equal work.
        platform: `tpu`, `gpu` or `cpu`.
    """
    devices = sorted({device for run in runs for device in run})
    if len(devices) < MAJORITY or len(runs) < (CPU_RUNS if platform == "cpu" else 2):
        return {}
    slow = {}
    for device in devices:
        ratios = []
        for run in runs:
            peers = [seconds for other, seconds in run.items() if other != device]
            if device in run and peers and median(peers) > 0:
                ratios.append(run[device] / median(peers))
        if not ratios:
            continue
        if platform == "cpu":
            factor, limit = min(ratios), CPU_SLOWER
        else:
            factor, limit = median(ratios), TPU_SLOWER if platform == "tpu" else OTHER_SLOWER
        if factor > limit:
            slow[device] = factor
    return slow
