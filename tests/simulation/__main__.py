"""Run many schedules and say which promises were broken.

    python -m tests.simulation --seeds 2000 [--first 1] [--workers 2]
    python -m tests.simulation --replay 1234

A schedule that breaks a promise is made shorter, told, and named by the command that replays it.
"""

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator

from tests.simulation.night import Outcome, simulate
from tests.simulation.schedule import draw
from tests.simulation.shrink import shrink

TWICE = 100
"""Of so many schedules one is run twice, to see that it goes the same way."""
DAY = 86400.0


def main() -> int:
    """Exit code 0 where every promise was kept."""
    options = argparse.ArgumentParser(prog="python -m tests.simulation")
    options.add_argument("--seeds", type=int, default=2000)
    options.add_argument("--first", type=int, default=1)
    options.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options.add_argument("--replay", type=int)
    asked = options.parse_args()
    # Sets of names have an order by their hashes, which Python draws anew for each process.
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        words = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execv(sys.executable, words)  # noqa: S606, ourselves
    logging.disable(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    if asked.replay is not None:
        return _replay(asked.replay)
    seeds = range(asked.first, asked.first + asked.seeds)
    broken = 0
    began, told, days = time.monotonic(), 0.0, 0.0
    for done, outcome in enumerate(_all(seeds, asked.workers), start=1):
        days += outcome.seconds / DAY
        if outcome.broken:
            broken += 1
            _tell(outcome)
        now = time.monotonic()
        if now > told + 10 and done < len(seeds):
            told = now
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


def _all(seeds: range, workers: int) -> Iterator[Outcome]:
    gc.freeze()
    # Each in a process of its own: what a killed server left behind is freed with it.
    context = multiprocessing.get_context("fork")
    with context.Pool(workers, initializer=gc.disable, maxtasksperchild=1) as pool:
        yield from pool.imap_unordered(_run, seeds)


def _run(seed: int) -> Outcome:
    outcome = simulate(draw(seed))
    if seed % TWICE == 0 and not outcome.broken:
        again = simulate(draw(seed))
        if again.fingerprint != outcome.fingerprint:
            lines = zip(outcome.story, again.story, strict=False)
            parted = next((pair for pair in lines if pair[0] != pair[1]), ("", ""))
            broken = (f"the same seed went two ways: {parted[0]} | {parted[1]}",)
            return Outcome(
                seed, broken, outcome.story, outcome.fingerprint, outcome.seconds, 0, outcome.lives
            )
    return outcome


def _tell(outcome: Outcome) -> None:
    print(f"\nseed {outcome.seed} breaks {len(outcome.broken)} promises:")
    for promise in outcome.broken[:5]:
        print(f"  {promise}")
    schedule = shrink(draw(outcome.seed), lambda shorter: bool(simulate(shorter).broken))
    again = simulate(schedule)
    print(f"the shortest schedule found that still breaks {list(again.broken[:2])}:")
    for line in schedule.told():
        print(f"  {line}")
    print("its story:")
    for line in again.story[-60:]:
        print(f"  {line}")
    print(f"replay it whole: python -m tests.simulation --replay {outcome.seed}\n", flush=True)


def _replay(seed: int) -> int:
    outcome = simulate(draw(seed))
    for line in outcome.story:
        print(line)
    for promise in outcome.broken:
        print(f"broken: {promise}")
    print(f"fingerprint {outcome.fingerprint}")
    return 1 if outcome.broken else 0


if __name__ == "__main__":
    sys.exit(main())
