"""Measure the start-up time of commands as a multiple of `python -c pass` in the same run.

    make bench

The aim is at most 16 times for `--help` and `chips`. The commands are interleaved, so that other
load on the machine slows all of them equally.
"""

import statistics
import subprocess
import sys
import time
from pathlib import Path

ROUNDS = 20
DRUMLINE = str(Path(sys.executable).with_name("drumline"))
COMMANDS = {
    "python -c pass": [sys.executable, "-c", "pass"],
    "drumline --help": [DRUMLINE, "--help"],
    "drumline chips": [DRUMLINE, "chips"],
    "drumline chips v4-128": [DRUMLINE, "chips", "v4-128"],
}


def seconds(command: list[str]) -> float:
    """Return the duration of one run."""
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    runs: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            runs[name].append(seconds(command))
    base = statistics.median(runs["python -c pass"])
    print(f"{'command':24}{'median':>9}{'times':>8}")
    for name, durations in runs.items():
        median = statistics.median(durations)
        print(f"{name:24}{median * 1000:6.0f} ms{median / base:7.1f}×")


if __name__ == "__main__":
    main()
