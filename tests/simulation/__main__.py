"""Run many schedules and print the violated invariants.

    python -m tests.simulation --seeds 2000 [--first 1] [--workers 2]
    python -m tests.simulation --replay 1234

A schedule that violates an invariant is shrunk and printed with the command that replays it.
"""

import argparse
import os
import sys
import time
from dataclasses import replace

from tests.simulation.runs import WorkerDied, fix_hash_seed, positive_integer, run_all
from tests.simulation.schedule import generate_schedule
from tests.simulation.shrink import shrink
from tests.simulation.simulation import Outcome, simulate

REPEAT_EVERY = 100
"""One schedule of this many runs twice, to check that both runs are equal."""
DAY = 86400.0


def main() -> int:
    """Return exit code 0 if no invariant was violated."""
    options = argparse.ArgumentParser(prog="python -m tests.simulation")
    options.add_argument("--seeds", type=positive_integer, default=2000)
    options.add_argument("--first", type=int, default=1)
    options.add_argument("--workers", type=positive_integer, default=os.cpu_count() or 1)
    options.add_argument("--replay", type=int)
    arguments = options.parse_args()
    fix_hash_seed()
    if arguments.replay is not None:
        return _replay(arguments.replay)
    try:
        return _many(range(arguments.first, arguments.first + arguments.seeds), arguments.workers)
    except KeyboardInterrupt:
        return 130
    except WorkerDied as error:
        print(error)
        return 1


def _many(seeds: range, workers: int) -> int:
    simulate(generate_schedule(0))  # Import every module before the worker processes are forked.
    violations = 0
    began_at, printed_at, days = time.monotonic(), 0.0, 0.0
    for count, (_, (outcome, report)) in enumerate(run_all(_run, seeds, workers), start=1):
        days += outcome.seconds / DAY
        if outcome.violations:
            violations += 1
            print(report, flush=True)
        now = time.monotonic()
        if now > printed_at + 10 and count < len(seeds):
            printed_at = now
            rate = count / (now - began_at)
            print(
                f"{count:,} of {len(seeds):,} · {rate:.1f} seeds/s ·"
                f" {days / (now - began_at):.1f} virtual days/s · {violations} broken",
                flush=True,
            )
    elapsed = time.monotonic() - began_at
    print(
        f"{elapsed:.0f} s, {len(seeds) / elapsed:.1f} seeds/s, {days / elapsed:.1f} virtual days/s"
    )
    print(f"{len(seeds)} schedules, {violations} broken")
    return 1 if violations else 0


def _run(seed: int) -> tuple[Outcome, str]:
    """Return the outcome of a schedule, and a report if it violated an invariant."""
    outcome = simulate(generate_schedule(seed))
    if outcome.violations:
        return outcome, _report_failure(outcome)
    if seed % REPEAT_EVERY == 0:
        repeated = simulate(generate_schedule(seed))
        if repeated.fingerprint != outcome.fingerprint:
            lines = zip(outcome.events, repeated.events, strict=False)
            difference = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
            violation = f"the same seed went two ways: {difference[0]} | {difference[1]}"
            return replace(outcome, violations=(violation,)), f"seed {seed}: {violation}"
    return outcome, ""


def _report_failure(outcome: Outcome) -> str:
    """Return the shortest schedule that still violates an invariant, with its events."""
    schedule = shrink(
        generate_schedule(outcome.seed), lambda shorter: bool(simulate(shorter).violations)
    )
    repeated = simulate(schedule)
    return "\n".join(
        [
            f"\nseed {outcome.seed} violates an invariant: {outcome.violations[0]}",
            f"the shortest schedule found that still violates one ({repeated.violations[0]}):",
            *(f"  {line}" for line in schedule.describe()),
            "its events:",
            *(f"  {line}" for line in repeated.events[-60:]),
            f"replay it whole: python -m tests.simulation --replay {outcome.seed}\n",
        ]
    )


def _replay(seed: int) -> int:
    outcome = simulate(generate_schedule(seed))
    for line in outcome.events:
        print(line)
    for violation in outcome.violations:
        print(f"broken: {violation}")
    print(f"fingerprint {outcome.fingerprint}")
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
