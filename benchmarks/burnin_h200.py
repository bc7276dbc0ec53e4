"""Run the burn-in on one GPU: the duration and rate of each test, and its detection of bit flips.

    python benchmarks/burnin_h200.py [--seconds 20]

The first burn-in has no fault. Then each test runs with a single bit flipped in the device's output
(on the host, after it was read back). The burn-in must detect every flip.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np

from drumline.health import burnin
from drumline.health.burnin import burn_in
from drumline.health.emulated import flip_bit, modify_shard
from drumline.health.runner import ChipRunner

FLIPPED = {"matmul_bf16": 3, "matmul_int8": 1, "functions": 1, "memory": 2}
"""The programs, with the index of the run in which a bit flips."""


class FlippingRunner(ChipRunner):
    """A runner that flips one bit in the output of one run of one program."""

    program = ""

    def __init__(self, devices: Any) -> None:
        """Start with a run count of zero."""
        super().__init__(devices)
        self.runs = 0

    def computed_outputs(self, name: str, outputs: Any) -> Any:
        """Return the outputs, with one bit flipped in one run."""
        if name != self.program:
            return outputs
        self.runs += 1
        if self.runs - 1 != FLIPPED[name]:
            return outputs
        leaves, structure = jax.tree.flatten(outputs)
        leaves[0] = modify_shard(leaves[0], self.local_devices[0], _flip)
        return jax.tree.unflatten(structure, leaves)


def _flip(values: np.ndarray) -> None:
    flip_bit(values, 12_345_678_901)


def main() -> None:
    """Print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20)
    options = parser.parse_args()
    devices = jax.devices()[:1]
    report = burn_in(devices, seconds=options.seconds)
    chip = report.devices[0]
    print(f"{chip.kind}, jax {jax.__version__}: {report.verdict} in {report.seconds:.1f} s")
    print(report.message)
    print(f"{'test':<14}{'verdict':>8}{'seconds':>9}{'rate':>9}{'catalogue':>11}{'share':>7}")
    for name, test in chip.tests.items():
        rate, unit = (test.tflops, "TFLOP/s") if test.tflops else (test.gb_per_s, "GB/s")
        columns = [
            "–" if test.seconds is None else f"{test.seconds:.2f}",
            "–" if not rate else f"{rate:,.0f}",
            "–" if not test.peak else f"{test.peak:,.0f}",
            "–" if test.share is None else f"{test.share:.0%}",
        ]
        print("{:<14}{:>8}{:>9}{:>9}{:>11}{:>7}".format(name, test.verdict, *columns), end="")
        print(f"  {unit if rate else ''} {test.message}".rstrip())
    burnin.ChipRunner = FlippingRunner  # type: ignore[attr-defined]
    for program in FLIPPED:
        FlippingRunner.program = program
        faulty_report = burn_in(devices, seconds=0.1)
        detected = [fault.chip for fault in faulty_report.faults] == [chip.id]
        print(
            f"one bit flipped in {program}: {'found' if detected else 'MISSED'}: "
            f"{faulty_report.message}"
        )


if __name__ == "__main__":
    main()
