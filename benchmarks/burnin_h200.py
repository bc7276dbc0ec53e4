"""The burn-in on one GPU: every test's time and rate beside the catalogue, and a bit that flips.

    python benchmarks/burnin_h200.py [--seconds 20]

First a sound burn-in, then for each test one with a single bit flipped in what the device computed
(on the host, after it was read back), which has to be found.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

from drumline.health import burnin
from drumline.health.bench import Bench
from drumline.health.burnin import burn_in
from drumline.health.emulated import changed, flip_bit

FLIPPED = {"matmul_bf16": 3, "matmul_int8": 1, "functions": 1, "memory": 2}
"""The programs, and in which of their runs a bit flips."""


class FlippingBench(Bench):
    """A bench on which one program once has one wrong bit in its output."""

    program = ""

    def __init__(self, devices: Any) -> None:
        """Nothing has run yet."""
        super().__init__(devices)
        self.runs = 0

    def computed(self, name: str, outputs: Any) -> Any:
        """What the chip computed, but for one bit of it."""
        if name != self.program:
            return outputs
        self.runs += 1
        if self.runs - 1 != FLIPPED[name]:
            return outputs
        leaves, structure = jax.tree.flatten(outputs)
        leaves[0] = changed(leaves[0], self.local[0], _flip)
        return jax.tree.unflatten(structure, leaves)


def _flip(values: np.ndarray) -> None:
    flip_bit(values, 12_345_678_901)


def main() -> None:
    """Print both."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--seconds", type=float, default=20)
    asked = words.parse_args()
    devices = jax.devices()[:1]
    report = burn_in(devices, seconds=asked.seconds)
    chip = report.devices[0]
    print(f"{chip.kind}, jax {jax.__version__}: {report.verdict} in {report.seconds:.1f} s")
    print(report.said)
    print(f"{'test':<14}{'verdict':>8}{'seconds':>9}{'rate':>9}{'catalogue':>11}{'share':>7}")
    for name, test in chip.tests.items():
        rate, unit = (test.tflops, "TFLOP/s") if test.tflops else (test.gb_per_s, "GB/s")
        shown = [
            "–" if test.seconds is None else f"{test.seconds:.2f}",
            "–" if not rate else f"{rate:,.0f}",
            "–" if not test.peak else f"{test.peak:,.0f}",
            "–" if test.share is None else f"{test.share:.0%}",
        ]
        print("{:<14}{:>8}{:>9}{:>9}{:>11}{:>7}".format(name, test.verdict, *shown), end="")
        print(f"  {unit if rate else ''} {test.said}".rstrip())
    burnin.Bench = FlippingBench  # type: ignore[attr-defined]
    for program in FLIPPED:
        FlippingBench.program = program
        found = burn_in(devices, seconds=0.1)
        blamed = [accusation.chip for accusation in found.accusations] == [chip.id]
        print(f"one bit flipped in {program}: {'found' if blamed else 'MISSED'}: {found.said}")


if __name__ == "__main__":
    main()
