"""What a process costs: time, memory, and how long a command takes."""

import statistics
import subprocess
import time
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def memory_mb(pid: int) -> float:
    """Proportional set size."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise ValueError("no Pss in smaps_rollup")


def median_seconds(command: list[str], home: Path, rounds: int = 11) -> float:
    """From start to exit."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, env={"DRUMLINE_HOME": str(home)}
        )
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
