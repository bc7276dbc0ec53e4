"""Measure the first job of someone who installs the wheel, from `pip install` to its first steps.

    python benchmarks/first_job.py --python python3.12 --hosts 2

It builds the wheel of this checkout and installs it with `[jax]` into a new environment in a
temporary folder, which is also the home folder. pip's downloads are part of the time.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
ACCELERATORS = {1: "v4-8", 2: "v4-16"}
FIRST_STEPS = re.compile(r"step \d+/")


class Newcomer:
    """A user with an empty home folder and an environment of their own."""

    def __init__(self, folder: Path) -> None:
        """Make a user whose home is this folder."""
        self.folder = folder
        self.programs = folder / "venv" / "bin"
        path = f"{self.programs}{os.pathsep}{os.environ['PATH']}"
        removed = {"DRUMLINE_HOME", "PYTHONPATH", "VIRTUAL_ENV"}
        kept = {name: value for name, value in os.environ.items() if name not in removed}
        self.environment = {**kept, "HOME": str(folder), "PATH": path}

    def run(self, *command: str | Path) -> str:
        """Run a command in the folder and return its output. It must succeed."""
        ended = subprocess.run(
            list(map(str, command)),
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return ended.stdout

    def drumline(self, *words: str) -> str:
        """Run the command line of the wheel and return its output."""
        return self.run(self.programs / "drumline", *words)


def measure(python: str, hosts: int, folder: Path) -> None:
    """Install, run the example, and print a line for each part."""
    user = Newcomer(folder)
    user.run(python, "-m", "venv", "venv")
    pip = (user.programs / "pip", "--disable-pip-version-check")
    user.run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", "dist", ROOT)
    [wheel] = (folder / "dist").glob("*.whl")
    version = user.run(user.programs / "python", "--version").strip()
    load = os.getloadavg()[0]
    print(f"{version}, {ACCELERATORS[hosts]}, load {load:.1f} on {os.cpu_count()} cores")
    begun = time.time()
    user.run(*pip, "install", "--quiet", f"{wheel}[jax]")
    installed = time.time()
    user.drumline("init", "--example")
    try:
        accelerator = f"accelerator={ACCELERATORS[hosts]}"
        story = user.drumline("create", "example/job.yaml", "--follow", "--set", accelerator)
        ended = time.time()
        lines = [json.loads(line) for line in user.drumline("logs", "1", "--json").splitlines()]
    finally:
        user.drumline("server", "stop", "--all")
    stepped = min(line["time"] for line in lines if FIRST_STEPS.match(line["text"]))
    print(f"{'pip install':28}{installed - begun:7.1f} s")
    print(f"{'init and create, first steps':28}{stepped - installed:7.1f} s")
    print(f"{'end of the job':28}{ended - stepped:7.1f} s")
    print(story, end="")


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--hosts", type=int, choices=ACCELERATORS, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-job-") as folder:
        measure(options.python, options.hosts, Path(folder))


if __name__ == "__main__":
    main()
