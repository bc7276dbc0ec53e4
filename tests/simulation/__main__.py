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

TWICE = 100
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
    simulate(
        generate_schedule(0)
    )  # so that every process begins with all that is imported on the way
    broken = 0
    began, printed_at, days = time.monotonic(), 0.0, 0.0
    for done, (_, (outcome, report)) in enumerate(run_all(_run, seeds, workers), start=1):
        days += outcome.seconds / DAY
        if outcome.broken:
            broken += 1
            print(report, flush=True)
        now = time.monotonic()
        if now > printed_at + 10 and done < len(seeds):
            printed_at = now
            rate = done / (now - began)
            print(
                f"{done:,} of {len(seeds):,} · {rate:.1f} seeds/s ·"
                f" {days / (now - began):.1f} virtual days/s · {broken} broken",
                flush=True,
            )
    took = time.monotonic() - began
    print(f"{took:.0f} s, {len(seeds) / took:.1f} seeds/s, {days / took:.1f} virtual days/s")
    print(f"{len(seeds)} schedules, {broken} broken")
    return 1 if broken else 0


def _run(seed: int) -> tuple[Outcome, str]:
    """Return the outcome of a schedule, and a report if it violated an invariant."""
    outcome = simulate(generate_schedule(seed))
    if outcome.broken:
        return outcome, _report_failure(outcome)
    if seed % TWICE == 0:
        again = simulate(generate_schedule(seed))
        if again.fingerprint != outcome.fingerprint:
            lines = zip(outcome.story, again.story, strict=False)
            parted = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
            broken = f"the same seed went two ways: {parted[0]} | {parted[1]}"
            return replace(outcome, broken=(broken,)), f"seed {seed}: {broken}"
    return outcome, ""


def _report_failure(outcome: Outcome) -> str:
    """Return the shortest schedule that still violates an invariant, with its events."""
    schedule = shrink(
        generate_schedule(outcome.seed), lambda shorter: bool(simulate(shorter).broken)
    )
    again = simulate(schedule)
    return "\n".join(
        [
            f"\nseed {outcome.seed} breaks a promise: {outcome.broken[0]}",
            f"the shortest schedule found that still breaks one ({again.broken[0]}):",
            *(f"  {line}" for line in schedule.told()),
            "its story:",
            *(f"  {line}" for line in again.story[-60:]),
            f"replay it whole: python -m tests.simulation --replay {outcome.seed}\n",
        ]
    )


def _replay(seed: int) -> int:
    outcome = simulate(generate_schedule(seed))
    for line in outcome.story:
        print(line)
    for promise in outcome.broken:
        print(f"broken: {promise}")
    print(f"fingerprint {outcome.fingerprint}")
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
