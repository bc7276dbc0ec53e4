"""Runs the command in the docstring of every small config and compares what it prints.

    .venv/bin/python benchmarks/docstrings.py [NAME …]

Losses may differ by 5 % (that of the router's scores by 20 %) and accuracies by 0.01: other
processors round otherwise. Exits 1 where one differs by more.
"""

import ast
import re
import subprocess
import sys
import time
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def figures(line: str) -> dict[str, float]:
    """`eval accuracy 0.98  eval loss 0.05` by name."""
    return {name: float(value) for name, value in re.findall(r"(\w[a-z ]*\w) ([\d.]+)", line)}


def differs(name: str, stated: float, printed: float) -> bool:
    """Whether two values of a figure are not the same to the bound."""
    bound = 0.01 if "accuracy" in name else stated * (0.2 if "z loss" in name else 0.05)
    return abs(stated - printed) > bound


def check(path: Path, command: str, stated: str) -> bool:
    """Run a command and say how it went."""
    begin = time.monotonic()
    words = [sys.executable, *command.split()[1:]]
    ran = subprocess.run(words, cwd=EXAMPLES.parent, capture_output=True, text=True, check=True)
    took = time.monotonic() - begin
    (printed,) = re.findall(r"^done: .*$", ran.stdout, re.MULTILINE)
    found, wanted = figures(printed), figures(stated)
    same = found.keys() == wanted.keys() and not any(
        differs(name, wanted[name], found[name]) for name in wanted
    )
    print(f"{path.stem:12}{took:6.0f} s  {'as stated' if same else 'NOT as stated'}  {printed}")
    return same


def main() -> int:
    """Print the table."""
    wrong = 0
    for path in sorted(EXAMPLES.glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text()), clean=False) or ""
        command = re.search(r"^    (python -m drumline\.train .*)$", said, re.MULTILINE)
        stated = re.search(r"^    (done: .*(?:\n    .*)*)$", said, re.MULTILINE)
        chosen = path.stem in sys.argv[1:] or len(sys.argv) == 1
        if command and stated and chosen:
            wrong += not check(path, command[1], stated[1])
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
