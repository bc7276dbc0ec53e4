"""A command in a process of its own, as a shell starts it."""

import subprocess
import sys
from typing import Any


def run_subprocess(*words: str, **files: Any) -> tuple[int, str]:
    """Exit code and stderr of the command line in a process of its own."""
    command = [sys.executable, "-c", "from drumline.cli import main; main()", *words]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, **files)
    return ended.returncode, ended.stderr
