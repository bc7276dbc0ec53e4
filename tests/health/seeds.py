"""A thousand faults, each planted on one of eight devices, and each to be blamed on the right one.

    python -m tests.health.seeds --seeds 1000 [--first 1]

A seed is one burn-in with one fault in it, or for one seed in six with none: a bit that flips in
what a device computed, in any test and any repeat; a word of memory; a link, once or always; a
device that is missing; one that is slow. Nobody else may be blamed, and without a fault nobody.
"""

# mypy: allow-untyped-calls

import argparse
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.compiling import quick_flags

os.environ.setdefault("XLA_FLAGS", quick_flags(8))
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

from drumline.health.bench import Bench
from drumline.health.burnin import CHECKS, burn
from drumline.health.checks.sizes import Sizes
from drumline.health.emulated import changed, flip_bit
from drumline.health.report import FAIL, PASS, WARN, BurnIn

DEVICES = 8
SMALL = Sizes(side=16, chain=2, inner=32, memory=2**13, block=2**12, words=64, numbers=512)
FAULTS = ("none", "flip", "memory", "link", "missing", "slow")


@dataclass
class Plant:
    """The fault of one seed."""

    seed: int
    fault: str
    chip: int
    """Its place among the devices; of a link, where it leads to."""
    step: int = 1
    """From which neighbour the link comes: 1 from the one before, -1 from the one after."""
    always: bool = False
    """Whether the link is always bad, or once."""
    rounds: int = 1
    factor: float = 1.0
    moment: int = -1
    """The call, among those that it can strike, in which it does."""

    @classmethod
    def drawn(cls, seed: int, calls: Counter[str]) -> "Plant":
        """The fault that a seed stands for; `calls` are those of one sound round."""
        dice = random.Random(seed)
        fault = FAULTS[seed % len(FAULTS)]
        plant = cls(seed, fault, dice.randrange(DEVICES))
        plant.rounds = dice.choice((1, 1, 2))
        plant.step = dice.choice((1, -1))
        plant.always = dice.random() < 0.5
        plant.factor = dice.uniform(20, 100)
        plant.moment = dice.randrange(calls[fault] * plant.rounds) if calls[fault] else -1
        return plant


@dataclass
class Clockwork:
    """Seconds that depend on no machine: every chip takes about as long, but for a slow one."""

    dice: random.Random = field(default_factory=lambda: random.Random(0))

    def seconds(self, devices: Sequence[int], slow: int | None, factor: float) -> dict[int, float]:
        return {
            device: self.dice.uniform(1, 1.5) * (factor if device == slow else 1)
            for device in devices
        }


class PlantingBench(Bench):
    """A bench on which one thing goes wrong."""

    def __init__(self, devices: Sequence[Any], plant: Plant) -> None:
        super().__init__(devices)
        self.plant = plant
        self.calls: Counter[str] = Counter()
        self._clock = Clockwork(random.Random(plant.seed))

    def computed(self, name: str, outputs: Any) -> Any:
        outputs = super().computed(name, outputs)
        if name == "memory":
            outputs = self._struck("memory", outputs)
        return self._struck("flip", outputs)

    def sent(self, name: str, outputs: Any) -> Any:
        outputs = super().sent(name, outputs)
        backwards = name.endswith("backwards")
        return self._struck("link", outputs) if backwards == (self.plant.step < 0) else outputs

    def clocked(self, name: str, seconds: dict[int, float]) -> dict[int, float]:
        del name
        slow = self.devices[self.plant.chip].id if self.plant.fault == "slow" else None
        return self._clock.seconds(list(seconds), slow, self.plant.factor)

    def _struck(self, fault: str, outputs: Any) -> Any:
        call = self.calls[fault]
        self.calls[fault] += 1
        plant = self.plant
        if plant.fault != fault or not (call == plant.moment or (plant.always and fault == "link")):
            return outputs
        dice = random.Random(f"{plant.seed} {call}")
        leaves, structure = jax.tree.flatten(outputs)
        which = dice.randrange(len(leaves))
        device = self.devices[plant.chip]
        leaves[which] = changed(
            leaves[which], device, lambda values: flip_bit(values, dice.randrange(2**40))
        )
        return jax.tree.unflatten(structure, leaves)


def burnt(plant: Plant) -> tuple[BurnIn, Counter[str]]:
    """The report of a burn-in with that fault, and how often it could have struck."""
    devices = jax.devices()[:DEVICES]
    checks = CHECKS
    if plant.fault == "missing":
        # Its gap is found before any program runs; seven devices would compile all of them anew.
        del devices[plant.chip]
        checks = ()
    bench = PlantingBench(devices, plant)
    rounds = iter(range(1, plant.rounds + 1))
    try:
        report = burn(
            bench,
            SMALL,
            {},
            expected=DEVICES,
            elapsed=lambda: next(rounds),
            seconds=plant.rounds,
            checks=checks,
        )
    finally:
        bench.close()
    return report, bench.calls


def sound_calls() -> Counter[str]:
    """How many calls of each kind a round has."""
    report, calls = burnt(Plant(0, "none", 0))
    assert report.verdict == PASS, report.said
    return calls


def judged(plant: Plant, report: BurnIn) -> str:
    """What is wrong with a report of that fault; nothing if it is right."""
    device = jax.devices()[plant.chip].id
    failed = [chip.id for chip in report.devices if chip.verdict == FAIL]
    warned = [chip.id for chip in report.devices if chip.verdict == WARN]
    accused = [(accusation.host, accusation.chip) for accusation in report.accusations]
    verdict, fails, accuses = report.verdict, [device], [(0, device)]
    why = report.accusations[0].why if report.accusations else ""
    wanted = {"memory": "read back not as written"}.get(plant.fault, "")
    match plant.fault:
        case "none":
            right = verdict == PASS and not failed and not warned and not accused
        case "slow":
            right = verdict == WARN and not failed and warned == [device] and not accused
        case "missing":
            named = f"7 of 8 devices: chip {plant.chip} is missing"
            right = verdict == FAIL and not failed and accused == [(0, None)] and why == named
        case "link":
            sender = jax.devices()[(plant.chip - plant.step) % DEVICES].id
            wanted = f"the link {sender} → {device} delivered"
            right = verdict == FAIL and failed == fails and accused == accuses and wanted in why
        case _:
            right = verdict == FAIL and failed == fails and accused == accuses and wanted in why
    if right:
        return ""
    return (
        f"seed {plant.seed}: {plant} gave {verdict}, {failed=} {warned=} {accused=}: {report.said}"
    )


def run(seeds: Sequence[int]) -> tuple[Counter[str], list[str]]:
    """The number of seeds of each fault, and what was wrong."""
    calls = sound_calls()
    ran: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        plant = Plant.drawn(seed, calls)
        mistake = judged(plant, burnt(plant)[0])
        ran[plant.fault] += 1
        if mistake:
            wrong.append(mistake)
            print(mistake, flush=True)
    return ran, wrong


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    words.add_argument("--seeds", type=int, default=1000)
    words.add_argument("--first", type=int, default=1)
    asked = words.parse_args()
    began = time.monotonic()
    ran, wrong = run(range(asked.first, asked.first + asked.seeds))
    kinds = ", ".join(f"{count} {fault}" for fault, count in ran.items())
    taken = time.monotonic() - began
    print(f"{ran.total()} seeds in {taken:.0f} s ({kinds}): {len(wrong)} judged wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
