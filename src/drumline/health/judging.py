"""From what was observed to who is to blame. Pure.

Only wrong values fail: a chip that is slow is warned of, as a busy host or a hot room does that
too. And where it cannot be told which chip is wrong, none is named.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType

from drumline.health.blame import blame
from drumline.health.observations import HOP, REDUCED, SAME, ZERO, Observation, Value
from drumline.health.report import FAIL, WARN

NO_KINDS: Mapping[int, str] = MappingProxyType({})
MAJORITY = 3
"""Chips of which one can be outvoted."""
TPU_SLOWER, OTHER_SLOWER = 1.05, 1.10
"""Chips of one slice run the same program in the same time: on a TPU nothing else runs. A GPU has
a clock of its own, by temperature and power."""
CPU_SLOWER = 4.0
"""Emulated chips share cores with each other and with everything else on the machine, so one has to
be this much slower in every single run. With eight of them on two busy cores a chip was up to 30
times slower than the others in one run, and never more than 1.02 times in each of six."""
CPU_RUNS = 6
LEAST_SHARE = {"tpu": 0.70, "gpu": 0.55}
"""Of the catalogue's peak, by platform. A GPU slows its clock down to stay within its power: a
sound H200 has 72 % of its peak in long products and 83 % of its bandwidth."""
UNJUDGED = {("gpu", "matmul_int8")}
"""Where the program keeps from the peak, not the chip: XLA's product of bytes uses 44 % of what a
sound H200 has."""


@dataclass(frozen=True)
class Finding:
    """Something that is wrong, with a chip where it can be told."""

    test: str
    why: str
    device: int | None = None
    verdict: str = FAIL
    link: tuple[int, int] | None = None
    """From and to, where what arrived is not what was sent."""
    among: tuple[int, ...] = ()
    """The chips of which it is one, where it cannot be told which."""


def findings(
    observations: Iterable[Observation], kinds: Mapping[int, str] = NO_KINDS
) -> list[Finding]:
    """Everything that is wrong, the first finding of each chip in each test first.

    Args:
        observations: those of one round, or of several.
        kinds: the kind of each chip. One program may round differently on two kinds, so only those
            of one kind are compared; where nothing is said, all are of one.
    """
    subjects: dict[tuple[str, str], list[Observation]] = {}
    for seen in observations:
        subjects.setdefault((seen.test, seen.subject), []).append(seen)
    rules = {SAME: _different, ZERO: _wrong_words, HOP: _lost_on_the_way, REDUCED: _wrong_together}
    found = []
    for together in subjects.values():
        runs = sorted(together, key=lambda seen: seen.run)
        rule = rules[runs[0].rule]
        if rule is _different:
            found += [one for of_kind in _by_kind(runs, kinds) for one in rule(of_kind)]
        else:
            found += rule(runs)
    return found


def _by_kind(runs: Sequence[Observation], kinds: Mapping[int, str]) -> list[list[Observation]]:
    """The runs once for each kind of chip, with the values of those chips alone."""
    there = sorted({kinds.get(device, "") for run in runs for device in run.values})
    return [
        [
            replace(run, values={d: v for d, v in run.values.items() if kinds.get(d, "") == kind})
            for run in runs
        ]
        for kind in there
    ]


def _name(seen: Observation) -> str:
    """`matmul bf16, near zero`, without the round, which tells a reader nothing."""
    return f"{seen.test.replace('_', ' ')}, {seen.subject.rpartition(', ')[0]}"


def _different(runs: Sequence[Observation]) -> list[Finding]:
    test, name, truth = runs[0].test, _name(runs[0]), runs[0].truth
    devices = sorted({device for run in runs for device in run.values})
    if truth is not None and len(devices) < MAJORITY:
        return [
            Finding(test, f"{name}: another checksum than numpy's in {_of(wrong, runs)}", device)
            for device in devices
            if (wrong := sum(run.values.get(device, truth) != truth for run in runs))
        ]
    found = blame([run.values for run in runs])
    others = f"the other {len(devices) - 1} chips" if len(devices) > 2 else "the other chip"
    versus = others if len(devices) > 1 else "its own repeat"
    result = [
        Finding(test, f"{name}: another checksum than {versus} in {_of(times, runs)}", device)
        for device, times in found.times.items()
    ]
    for torn in found.tied:
        chips = " and ".join(map(str, torn))
        why = f"{name}: chips {chips} differ, and none of them has a majority"
        result.append(Finding(test, why, among=torn))
    if found.spread:
        why = f"{name}: all chips agree, but not on what they said before"
        result.append(Finding(test, why, among=tuple(devices)))
    if not found and truth is not None and any(v != truth for v in runs[0].values.values()):
        why = f"{name}: all chips agree on another checksum than numpy's: a compiler, or all chips"
        result += [Finding(test, why, device, WARN) for device in devices]
    return result


def _of(times: int, runs: Sequence[Observation]) -> str:
    return f"{times} of {len(runs)} runs"


def _words(count: int) -> str:
    return f"{count:,} word{'' if count == 1 else 's'}"


def _wrong_words(runs: Sequence[Observation]) -> list[Finding]:
    found = []
    for seen in runs:
        for device, (wrong, *_) in sorted(seen.values.items()):
            if wrong:
                why = f"{_name(seen)}: {_words(wrong)} read back not as written"
                found.append(Finding(seen.test, why, device))
    return found


def _lost_on_the_way(hops: Sequence[Observation]) -> list[Finding]:
    """A buffer that was right where it was sent and wrong where it arrived; or wrong otherwise."""
    found = []
    before: Mapping[int, Value] = {}
    for hop in hops:
        for device, (wrong, *sums) in sorted(hop.values.items()):
            sender = hop.senders.get(device)
            if not wrong:
                continue
            if sender is None:
                why = f"links: {_words(wrong)} wrong in the buffer that it made for sending"
                found.append(Finding(hop.test, why, device))
                continue
            wrong_before, *sums_before = before.get(sender, (0,))
            if wrong_before and sums == sums_before:
                continue  # arrived as it was sent; the fault was earlier on the way
            why = (
                f"{_name(hop)}: the link {sender} → {device} delivered {_words(wrong)} "
                f"not as sent, hop {hop.run}"
            )
            found.append(Finding(hop.test, why, device, link=(sender, device)))
        before = hop.values
    return found


def _wrong_together(runs: Sequence[Observation]) -> list[Finding]:
    """A collective's result passes many chips: only where a single one has it wrong is it named."""
    found = []
    for seen in runs:
        wrong = sorted(device for device, (words, *_) in seen.values.items() if words)
        if len(wrong) == 1:
            words = _words(seen.values[wrong[0]][0])
            why = f"{_name(seen)}: {words} wrong on this chip alone"
            found.append(Finding(seen.test, why, wrong[0]))
        elif wrong:
            why = f"{_name(seen)}: wrong on {len(wrong)} of {len(seen.values)} chips"
            found.append(Finding(seen.test, why, among=tuple(seen.values)))
    return found


def slow_chips(runs: Sequence[Mapping[int, float]], platform: str) -> dict[int, float]:
    """Chips that are slower than their peers, and by what factor.

    Args:
        runs: seconds by device, of runs that all do the same work.
        platform: `tpu`, `gpu` or `cpu`.
    """
    devices = sorted({device for run in runs for device in run})
    if len(devices) < MAJORITY or len(runs) < (CPU_RUNS if platform == "cpu" else 2):
        return {}
    slow = {}
    for device in devices:
        ratios = []
        for run in runs:
            others = [taken for other, taken in run.items() if other != device]
            if device in run and others and median(others) > 0:
                ratios.append(run[device] / median(others))
        if not ratios:
            continue
        if platform == "cpu":
            factor, limit = min(ratios), CPU_SLOWER
        else:
            factor, limit = median(ratios), TPU_SLOWER if platform == "tpu" else OTHER_SLOWER
        if factor > limit:
            slow[device] = factor
    return slow
