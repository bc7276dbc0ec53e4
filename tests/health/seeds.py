"""Inject a thousand faults, one at a time, and check that the burn-in names the right device.

    python -m tests.health.seeds --seeds 1000 [--first 1]

Each seed is one burn-in of eight devices with one fault, or for one seed in six with none: a bit
flip in the output of any test and repeat, a wrong word of memory, a bad link, once or always, a
missing device, or a slow one. No other device may be named, and without a fault none at all.
"""

# mypy: allow-untyped-calls

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.compiling import quick_flags

os.environ.setdefault("XLA_FLAGS", quick_flags(8))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from drumline.health.burnin import CHIP_TESTS, run_burn_in
from drumline.health.emulated import flip_bit, modify_shard
from drumline.health.inputs import Sizes
from drumline.health.report import FAIL, PASS, WARN, HealthReport
from drumline.health.runner import ChipRunner

DEVICES = 8
SMALL = Sizes(
    matmul_size=16,
    chain=2,
    inner=32,
    memory=2**13,
    block=2**12,
    link_buffer=64,
    numbers=512,
)
FAULTS = ("none", "flip", "memory", "link", "missing", "slow")


@dataclass
class InjectedFault:
    """The fault of one seed."""

    seed: int
    kind: str
    chip: int
    """The index of the faulty device; for a link, of its receiver."""
    step: int = 1
    """The direction of the link: 1 from the previous device, -1 from the next."""
    always: bool = False
    """True if the link is always bad, False if it is bad once."""
    rounds: int = 1
    factor: float = 1.0
    call: int = -1
    """The index of the affected call among those that the fault can affect."""

    @classmethod
    def random(cls, seed: int, calls: Counter[str]) -> "InjectedFault":
        """Return the fault of a seed. `calls` are the calls of one round without a fault."""
        rng = random.Random(seed)
        kind = FAULTS[seed % len(FAULTS)]
        fault = cls(seed, kind, rng.randrange(DEVICES))
        fault.rounds = rng.choice((1, 1, 2))
        fault.step = rng.choice((1, -1))
        fault.always = rng.random() < 0.5
        fault.factor = rng.uniform(20, 100)
        fault.call = rng.randrange(calls[kind] * fault.rounds) if calls[kind] else -1
        return fault


class FaultyRunner(ChipRunner):
    """A runner that injects one fault and whose times do not depend on the machine."""

    def __init__(self, devices: Sequence[Any], fault: InjectedFault) -> None:
        super().__init__(devices)
        self.fault = fault
        self.calls: Counter[str] = Counter()
        self._clock = random.Random(fault.seed)

    def computed_outputs(self, name: str, outputs: Any) -> Any:
        outputs = super().computed_outputs(name, outputs)
        if name == "memory":
            outputs = self._inject("memory", outputs)
        return self._inject("flip", outputs)

    def received_outputs(self, name: str, outputs: Any) -> Any:
        outputs = super().received_outputs(name, outputs)
        backwards = name.endswith("backwards")
        return self._inject("link", outputs) if backwards == (self.fault.step < 0) else outputs

    def measured_seconds(self, name: str, seconds: dict[int, float]) -> dict[int, float]:
        del name
        slow = self.devices[self.fault.chip].id if self.fault.kind == "slow" else None
        return {
            device: self._clock.uniform(1, 1.5) * (self.fault.factor if device == slow else 1)
            for device in seconds
        }

    def _inject(self, kind: str, outputs: Any) -> Any:
        call = self.calls[kind]
        self.calls[kind] += 1
        fault = self.fault
        if fault.kind != kind or not (call == fault.call or (fault.always and kind == "link")):
            return outputs
        rng = random.Random(f"{fault.seed} {call}")
        leaves, structure = jax.tree.flatten(outputs)
        index = rng.randrange(len(leaves))
        device = self.devices[fault.chip]
        leaves[index] = modify_shard(
            leaves[index], device, lambda values: flip_bit(values, rng.randrange(2**40))
        )
        return jax.tree.unflatten(structure, leaves)


def burn_in_with(fault: InjectedFault) -> tuple[HealthReport, Counter[str]]:
    """Run a burn-in with a fault. Return its report and the calls that each kind could affect."""
    devices = jax.devices()[:DEVICES]
    chip_tests = CHIP_TESTS
    if fault.kind == "missing":
        # The gap is found before any program runs, and programs for seven devices would have to be
        # compiled.
        del devices[fault.chip]
        chip_tests = ()
    runner = FaultyRunner(devices, fault)
    rounds = iter(range(1, fault.rounds + 1))
    try:
        report = run_burn_in(
            runner,
            SMALL,
            {},
            expected_devices=DEVICES,
            elapsed=lambda: next(rounds),
            seconds=fault.rounds,
            chip_tests=chip_tests,
        )
    finally:
        runner.close()
    return report, runner.calls


def count_calls() -> Counter[str]:
    """Return the number of calls that each kind of fault can affect in one round."""
    report, calls = burn_in_with(InjectedFault(0, "none", 0))
    assert report.verdict == PASS, report.message
    return calls


def find_error(fault: InjectedFault, report: HealthReport) -> str:
    """Return a message if the report is wrong for the fault, else an empty string."""
    device = jax.devices()[fault.chip].id
    failed = [chip.id for chip in report.devices if chip.verdict == FAIL]
    warned = [chip.id for chip in report.devices if chip.verdict == WARN]
    named = [(fault_report.host, fault_report.chip) for fault_report in report.faults]
    verdict = report.verdict
    reason = report.faults[0].reason if report.faults else ""
    is_only_failure = verdict == FAIL and failed == [device] and named == [(0, device)]
    match fault.kind:
        case "none":
            correct = verdict == PASS and not failed and not warned and not named
        case "slow":
            correct = verdict == WARN and not failed and warned == [device] and not named
        case "missing":
            expected = f"7 of 8 devices: chip {fault.chip} is missing"
            correct = verdict == FAIL and not failed and named == [(0, None)] and reason == expected
        case "link":
            sender = jax.devices()[(fault.chip - fault.step) % DEVICES].id
            correct = is_only_failure and f"the link {sender} → {device} delivered" in reason
        case "memory":
            correct = is_only_failure and "read back not as written" in reason
        case _:
            correct = is_only_failure
    if correct:
        return ""
    return (
        f"seed {fault.seed}: {fault} gave {verdict}, {failed=} {warned=} {named=}: {report.message}"
    )


def run(seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """Run these seeds. Return the number of seeds of each kind, and the errors."""
    calls = count_calls()
    counts: Counter[str] = Counter()
    errors = []
    for seed in seeds:
        fault = InjectedFault.random(seed, calls)
        error = find_error(fault, burn_in_with(fault)[0])
        counts[fault.kind] += 1
        if error:
            errors.append(error)
            print(error, flush=True)
    return counts, errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1)
    options = parser.parse_args()
    started_at = time.monotonic()
    counts, errors = run(range(options.first, options.first + options.seeds))
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    seconds = time.monotonic() - started_at
    print(f"{counts.total()} seeds in {seconds:.0f} s ({kinds}): {len(errors)} judged wrong")
    sys.exit(1 if errors else 0)


if __name__ == "__main__":
    main()
