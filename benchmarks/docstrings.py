"""Run the command in the docstring of every small config and compare its output.

    .venv/bin/python benchmarks/docstrings.py [NAME …]

Losses may differ by 5 % (the router's z loss by 20 %) and accuracies by 0.01, because processors
round differently. The exit code is 1 if one differs by more.
"""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def figures(line: str) -> dict[str, float]:
    """Parse the figures of a line such as `eval accuracy 0.98  eval loss 0.05`, by name."""
    return {name: float(value) for name, value in re.findall(r"(\w[a-z ]*\w) ([\d.]+)", line)}


def differs(name: str, stated: float, printed: float) -> bool:
    """Return True if the two values of a figure differ by more than its tolerance."""
    tolerance = 0.01 if "accuracy" in name else stated * (0.2 if "z loss" in name else 0.05)
    return abs(stated - printed) > tolerance


def check(path: Path, command: str, stated: str) -> bool:
    """Run a command, print the comparison, and return True if its figures agree."""
    start = time.monotonic()
    arguments = [sys.executable, *command.split()[1:]]
    process = subprocess.run(
        arguments, cwd=EXAMPLES.parent, capture_output=True, text=True, check=True
    )
    duration = time.monotonic() - start
    (printed,) = re.findall(r"^done: .*$", process.stdout, re.MULTILINE)
    printed_figures, stated_figures = figures(printed), figures(stated)
    agrees = printed_figures.keys() == stated_figures.keys() and not any(
        differs(name, stated_figures[name], printed_figures[name]) for name in stated_figures
    )
    print(
        f"{path.stem:12}{duration:6.0f} s  {'as stated' if agrees else 'NOT as stated'}  {printed}"
    )
    return agrees


def main() -> int:
    """Print the table."""
    failures = 0
    for path in sorted(EXAMPLES.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        command = re.search(r"^    (python -m drumline\.train .*)$", docstring, re.MULTILINE)
        stated = re.search(r"^    (done: .*(?:\n    .*)*)$", docstring, re.MULTILINE)
        selected = path.stem in sys.argv[1:] or len(sys.argv) == 1
        if command and stated and selected:
            failures += not check(path, command[1], stated[1])
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
