"""How long a command takes to start, as a multiple of `python -c pass` in the same run.

    make bench

Aim: `--help` and `chips` within 16 times. Interleaved, so that a busy machine slows all alike.
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
    """One run, from start to exit."""
    begin = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    runs: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(ROUNDS):
        for name, command in COMMANDS.items():
            runs[name].append(seconds(command))
    base = statistics.median(runs["python -c pass"])
    print(f"{'command':24}{'median':>9}{'times':>8}")
    for name, times in runs.items():
        median = statistics.median(times)
        print(f"{name:24}{median * 1000:6.0f} ms{median / base:7.1f}×")


if __name__ == "__main__":
    main()
