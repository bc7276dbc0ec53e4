"""What the TPU's own compiler makes of our rings, beside plain `jit`, without a TPU.

    python benchmarks/tpu_compile.py [WORD …] [--on v5litepod-8] [--ring 4] [--every-way]
                                     [--keep FILE] [--schedule]

Needs libtpu (`pip install 'drumline[tpu]'` on x86_64 Linux, or `DRUMLINE_TPU_PYTHON`). Each row is
a product and a way to compute it: `jit` as XLA has it, with its own collective matmul; the same
with that off; our rings, and the same told to begin hops early (`overlap_options`), where that
gains. For each the schedule is read:

    cycles    the compiler's own estimates, loops multiplied out
    moved     the same, with the bandwidth's figures where data is only moved: of those the
              compiler's are 3 to 10 times too high
    waits     exposed hops and collectives, at link bandwidth
    of jit    cycles + waits over those of `jit`, by the first reading and by the second
    hops      permutes, those that wait for more than a twentieth of their time, bytes of one
    copies    copies, and the cycles that they take
    temp      MiB of temporaries on a device

Only rows whose names hold all the WORDs are compiled. `--keep` remembers rows in a file and does
not compile them again; `--schedule` prints under each row what stands between start and end of each
hop. Estimates throughout: nothing here was measured on a TPU.
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

WAITS = 0.05
"""The part of a hop's time from which on it counts as exposed."""


@dataclass(frozen=True)
class Row:
    """What was read from one compiled program."""

    cycles: float
    moved: float
    waits: float
    """All three in cycles."""
    clock: float
    hops: int
    exposed: int
    hop_bytes: int
    copies: int
    copy_cycles: float
    temp: int
    between: tuple[str, ...]

    def cost(self, reading: str) -> float:
        """Cycles of computing and waiting."""
        return (self.cycles if reading == "cycles" else self.moved) + self.waits


def measured(case: Case, on: str) -> Row:
    """Compile a case, and read it."""
    machine = parse_machine(on)
    compiled = compile_for(
        machine, case.fn, case.args, mesh=case.mesh, compiler="tpu", options=case.options
    )
    estimate = estimate_program(compiled, machine, "rings")
    clock = machine.constants.clock_hz or 0.0
    own, moved = _cycles(estimate, clock)
    events = list(estimate.timeline.leaf_events())
    permutes = [(e, times) for e, times in events if e.kind == "collective-permute"]
    copies = [
        (e, times) for e, times in events if e.resource == DEVICE and e.name.startswith("copy")
    ]
    found = find_collectives(compiled.module, compiled.mesh)
    return Row(
        cycles=own,
        moved=moved,
        waits=estimate.exposed * clock,
        clock=clock,
        hops=sum(times for _, times in permutes),
        exposed=sum(times for e, times in permutes if e.exposed > WAITS * e.seconds),
        hop_bytes=max((one.sent for one in found if one.kind == "collective-permute"), default=0),
        copies=sum(times for _, times in copies),
        copy_cycles=clock
        * sum((e.cost.compiler_seconds or e.cost.seconds) * times for e, times in copies),
        temp=compiled.memory.get("temporaries", 0),
        between=tuple(
            f"{one.kind} {one.sent / 2**20:.1f} MiB ×{one.count}: "
            f"{', '.join(one.between) or ('nothing' if one.asynchronous else 'blocking')}"
            for one in found
        ),
    )


def _cycles(estimate: Estimate, clock: float) -> tuple[float, float]:
    """The compiler's own cycles, and those that count where it is far from the bandwidth."""
    events = [
        (e.cost, times) for e, times in estimate.timeline.leaf_events() if e.resource == DEVICE
    ]
    own = sum((cost.compiler_seconds or cost.seconds) * times for cost, times in events)
    return own * clock, sum(cost.seconds * times for cost, times in events) * clock


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("words", nargs="*", help="only rows whose names hold all of them")
    parser.add_argument("--on", default="v5litepod-8", help="a slice")
    parser.add_argument("--ring", type=int, default=4, help="devices of a ring")
    parser.add_argument("--every-way", action="store_true", help="all directions and loops")
    parser.add_argument("--keep", type=Path, help="a file that remembers rows")
    parser.add_argument("--schedule", action="store_true", help="what stands between")
    given = parser.parse_args()
    kept = _Kept(given.keep)
    print(
        f"{f'on {given.on}, rings of {given.ring}':44}{'':18}{'cycles':>9}{'moved':>9}{'waits':>8}"
        f"{'of jit':>12}  {'hops':>12}  {'copies':>10}{'temp':>7}"
    )
    plain: dict[str, Row] = {}
    for case in cases(given.on, given.ring, every_way=given.every_way):
        label = f"{case.name}, {case.way}"
        if not all(word in label for word in given.words):
            continue
        key = f"{given.on}/{given.ring}/{label}"
        row = kept.rows.get(key) or kept.put(key, measured(case, given.on))
        if case.way == "jit":
            plain[case.name] = row
        print(_line(case, row, plain.get(case.name)), flush=True)
        if given.schedule:
            for told in row.between:
                print(f"      {told}")


def _line(case: Case, row: Row, plain: Row | None) -> str:
    ratio = ""
    if plain is not None:
        both = (row.cost(reading) / plain.cost(reading) for reading in ("cycles", "moved"))
        ratio = " ".join(f"{one:.2f}" for one in both)
    hops = f"{row.hops}/{row.exposed} {row.hop_bytes / 2**20:.1f}M" if row.hops else ""
    copies = f"{row.copies} {row.copy_cycles / 1e3:.0f}k" if row.copies else ""
    return (
        f"{case.name:44}{case.way:18}{row.cycles / 1e3:8.1f}k{row.moved / 1e3:8.1f}k"
        f"{row.waits / 1e3:7.1f}k{ratio:>12}  {hops:>12}  {copies:>10}{row.temp / 2**20:7.1f}"
    )


class _Kept:
    """Rows of earlier runs, one a line."""

    def __init__(self, path: Path | None):
        self._path = path
        self.rows: dict[str, Row] = {}
        if path is not None and path.exists():
            for line in path.read_text().splitlines():
                told = json.loads(line)
                key = told.pop("key")
                self.rows[key] = Row(**told)

    def put(self, key: str, row: Row) -> Row:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key} | asdict(row)) + "\n")
        return row


if __name__ == "__main__":
    main()
