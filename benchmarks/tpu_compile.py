"""Compile the ring matmuls and plain `jit` with the TPU's own compiler, without a TPU.

    python benchmarks/tpu_compile.py [WORD …] [--on v5litepod-8] [--ring 4] [--every-way]
                                     [--keep FILE] [--schedule]

Needs libtpu (`pip install 'drumline[tpu]'` on x86_64 Linux, or `DRUMLINE_TPU_PYTHON`). Each row is
a matmul and its implementation: `jit` with XLA's own collective matmul, `jit` without it, the rings
of Drumline, and the rings with options that start permutes early (`overlap_options`), if that
helps. The benchmark reads each schedule:

    cycles    the compiler's own estimates, multiplied by loop counts
    moved     the same, with the bandwidth's figures for operations that only move data: the
              compiler's figures are 3 to 10 times too high for these
    waits     exposed permutes and collectives, at link bandwidth
    of jit    cycles + waits relative to `jit`, by the first reading and by the second
    hops      permutes, those exposed for more than a twentieth of their time, bytes of one
    copies    copies, and their cycles
    temp      MiB of temporaries on a device

Only rows with names that contain all WORDs are compiled. `--keep` saves rows in a file and does not
compile them again. `--schedule` prints the operations between the start and the end of each permute
under its row. The figures are estimates. Nothing here was measured on a TPU.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from drumline.inspect.collectives import find_collectives
from drumline.inspect.compiling.programs import compile_for
from drumline.inspect.cost.machines import parse_machine
from drumline.inspect.cost.timeline import DEVICE
from drumline.inspect.estimate import Estimate, estimate_program
from tpu_cases import Case, cases

EXPOSED_FRACTION = 0.05
"""The exposed fraction above which a permute counts as exposed."""


@dataclass(frozen=True)
class Row:
    """The figures of one compiled program."""

    cycles: float
    moved: float
    waits: float
    """The three counts above are in cycles."""
    clock: float
    hops: int
    exposed: int
    hop_bytes: int
    copies: int
    copy_cycles: float
    temp: int
    between: tuple[str, ...]

    def cost(self, reading: str) -> float:
        """Return the cycles of computing and waiting."""
        return (self.cycles if reading == "cycles" else self.moved) + self.waits


def compile_row(case: Case, on: str) -> Row:
    """Compile a program and read its schedule."""
    machine = parse_machine(on)
    compiled = compile_for(
        machine, case.fn, case.args, mesh=case.mesh, compiler="tpu", options=case.options
    )
    estimate = estimate_program(compiled, machine, "rings")
    clock = machine.constants.clock_hz or 0.0
    compiler_cycles, moved = _cycles(estimate, clock)
    events = list(estimate.timeline.leaf_events())
    permutes = [(e, count) for e, count in events if e.kind == "collective-permute"]
    copies = [
        (e, count) for e, count in events if e.resource == DEVICE and e.name.startswith("copy")
    ]
    collectives = find_collectives(compiled.module, compiled.mesh)
    return Row(
        cycles=compiler_cycles,
        moved=moved,
        waits=estimate.exposed * clock,
        clock=clock,
        hops=sum(count for _, count in permutes),
        exposed=sum(count for e, count in permutes if e.exposed > EXPOSED_FRACTION * e.seconds),
        hop_bytes=max(
            (transfer.sent for transfer in collectives if transfer.kind == "collective-permute"),
            default=0,
        ),
        copies=sum(count for _, count in copies),
        copy_cycles=clock
        * sum((e.cost.compiler_seconds or e.cost.seconds) * count for e, count in copies),
        temp=compiled.memory.get("temporaries", 0),
        between=tuple(
            f"{transfer.kind} {transfer.sent / 2**20:.1f} MiB ×{transfer.count}: "
            f"{', '.join(transfer.between) or ('nothing' if transfer.asynchronous else 'blocking')}"
            for transfer in collectives
        ),
    )


def _cycles(estimate: Estimate, clock: float) -> tuple[float, float]:
    """Return the compiler's own cycles, and the cycles corrected where they miss the bandwidth."""
    events = [
        (e.cost, count) for e, count in estimate.timeline.leaf_events() if e.resource == DEVICE
    ]
    compiler_cycles = sum((cost.compiler_seconds or cost.seconds) * count for cost, count in events)
    return compiler_cycles * clock, sum(cost.seconds * count for cost, count in events) * clock


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows with names that contain all words")
    parser.add_argument("--on", default="v5litepod-8", help="the slice to compile for")
    parser.add_argument("--ring", type=int, default=4, help="devices of a ring")
    parser.add_argument("--every-way", action="store_true", help="compile all directions and loops")
    parser.add_argument("--keep", type=Path, help="the file of saved rows")
    parser.add_argument(
        "--schedule", action="store_true", help="print the operations between start and end"
    )
    options = parser.parse_args()
    saved_rows = _SavedRows(options.keep)
    print(
        f"{f'on {options.on}, rings of {options.ring}':44}{'':18}{'cycles':>9}{'moved':>9}"
        f"{'waits':>8}"
        f"{'of jit':>12}  {'hops':>12}  {'copies':>10}{'temp':>7}"
    )
    baselines: dict[str, Row] = {}
    for case in cases(options.on, options.ring, every_implementation=options.every_way):
        label = f"{case.name}, {case.way}"
        if not all(filter_word in label for filter_word in options.words):
            continue
        key = f"{options.on}/{options.ring}/{label}"
        row = saved_rows.rows.get(key) or saved_rows.save(key, compile_row(case, options.on))
        if case.way == "jit":
            baselines[case.name] = row
        print(_format_row(case, row, baselines.get(case.name)), flush=True)
        if options.schedule:
            for transfer in row.between:
                print(f"      {transfer}")


def _format_row(case: Case, row: Row, baselines: Row | None) -> str:
    ratio = ""
    if baselines is not None:
        ratios = (row.cost(reading) / baselines.cost(reading) for reading in ("cycles", "moved"))
        ratio = " ".join(f"{transfer:.2f}" for transfer in ratios)
    hops = f"{row.hops}/{row.exposed} {row.hop_bytes / 2**20:.1f}M" if row.hops else ""
    copies = f"{row.copies} {row.copy_cycles / 1e3:.0f}k" if row.copies else ""
    return (
        f"{case.name:44}{case.way:18}{row.cycles / 1e3:8.1f}k{row.moved / 1e3:8.1f}k"
        f"{row.waits / 1e3:7.1f}k{ratio:>12}  {hops:>12}  {copies:>10}{row.temp / 2**20:7.1f}"
    )


class _SavedRows:
    """The rows of earlier runs, saved one per line."""

    def __init__(self, path: Path | None):
        self._path = path
        self.rows: dict[str, Row] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                saved = json.loads(line)
                key = saved.pop("key")
                self.rows[key] = Row(**saved)

    def save(self, key: str, row: Row) -> Row:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key} | asdict(row)) + "\n")
        return row


if __name__ == "__main__":
    main()
