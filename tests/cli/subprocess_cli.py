"""The command line as a separate process."""

import subprocess
import sys
from typing import Any


def run_subprocess(*words: str, **files: Any) -> tuple[int, str]:
    """Return exit code and stderr of the command line in a separate process."""
    command = [sys.executable, "-c", "from drumline.cli import main; main()", *words]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, **files)
    return ended.returncode, ended.stderr
