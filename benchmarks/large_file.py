"""Measure the start of jobs whose code has a large file that cannot be compressed.

    python benchmarks/large_file.py --megabytes 200 [--source ../other/src]

It prints the time from `create` to the first line of the program on the last of two emulated hosts,
for a job and for a second one whose other files have changed. The server and the emulator run
before. `--source` measures another version of Drumline.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
JOB = "name: large\naccelerator: v4-16\nrun: python main.py\n"
PROGRAM = """\
import os, time
host, job = os.environ["DRUMLINE_HOST"], os.environ["DRUMLINE_JOB_ID"]
size = os.path.getsize("data.bin")
open(f"{folder}/{{job}}-{{host}}", "w").write(f"{{time.time()}} {{size}}")
"""


class Home:
    """A temporary home folder, used with the command line of one version of Drumline."""

    def __init__(self, folder: Path, source: Path) -> None:
        """`source` is the folder with the package."""
        self._environment = {
            **os.environ,
            "DRUMLINE_HOME": str(folder / "home"),
            "PYTHONPATH": os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")]),
        }

    def drumline(self, *words: str) -> str:
        """Run a command and return its output."""
        ended = subprocess.run(
            [sys.executable, "-m", "drumline", *words],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return ended.stdout


def first_line_seconds(home: Home, folder: Path, yes: list[str]) -> float:
    """Return the time from `create` to the first line of the program on the last host."""
    starts = folder / "starts"
    before = set(starts.iterdir())
    began = time.time()
    home.drumline("create", str(folder / "code" / "job.yaml"), *yes)
    while len(new := set(starts.iterdir()) - before) < 2:
        time.sleep(0.05)
    home.drumline("wait", "--all")
    return max(float(file.read_text().split()[0]) for file in new) - began


def measure(source: Path, megabytes: int, folder: Path) -> None:
    """Run two jobs and print their times."""
    home = Home(folder, source)
    (folder / "starts").mkdir()
    small, code = folder / "small", folder / "code"
    small.mkdir()
    code.mkdir()
    (small / "job.yaml").write_text("accelerator: v4-16\nrun: 'true'\n")
    (code / "job.yaml").write_text(JOB)
    with open(code / "data.bin", "wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(10**6))
    yes = ["--yes"] if "--yes" in home.drumline("create", "--help") else []
    try:
        home.drumline("create", str(small / "job.yaml"))
        home.drumline("wait", "--all")
        for job in ("first", "second"):
            program = PROGRAM.format(folder=folder / "starts")
            (code / "main.py").write_text(f"{program}# {job}\n")
            print(f"{job:<6}  {first_line_seconds(home, folder, yes):6.1f} s", flush=True)
    finally:
        home.drumline("server", "stop")
        home.drumline("emulator", "stop")


def main() -> None:
    """Measure one version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--source", type=Path, default=SOURCE)
    options = parser.parse_args()
    # Unix sockets take 100 characters.
    with tempfile.TemporaryDirectory(prefix="dl-") as folder:
        measure(options.source.absolute(), options.megabytes, Path(folder))


if __name__ == "__main__":
    main()
