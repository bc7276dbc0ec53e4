"""Measure the CPU time and memory of a process, and the duration of a command."""

import statistics
import subprocess
import time
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def memory_mb(pid: int) -> float:
    """Return the proportional set size of a process, in MB."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise ValueError("no Pss in smaps_rollup")


def median_seconds(command: list[str], home: Path, rounds: int = 11) -> float:
    """Return the median duration of a command over several runs."""
    durations = []
    for _ in range(rounds):
        start = time.perf_counter()
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={"DRUMLINE_HOME": str(home)}
        )
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)
