"""How much of a job's logs is kept."""

import shutil
from pathlib import Path

TRIMMED = "trimmed"
"""The file that marks the folder of an attempt whose logs were removed for the limit."""


def trim(folder: Path, newest: int, most: int) -> None:
    """Remove logs of attempts between the first and the newest until a job's logs fit the limit.

    Both ends are kept, because they show why a job failed: how it began, and how it ended.
    """
    kept = {}
    for number in range(1, newest):
        files = [file for file in (folder / str(number)).glob("host-*") if file.is_file()]
        kept[number] = sum(file.stat().st_size for file in files)
    for number in range(2, newest - 1):
        if sum(kept.values()) <= most:
            return
        if kept[number]:
            shutil.rmtree(folder / str(number), ignore_errors=True)
            (folder / str(number)).mkdir(parents=True, exist_ok=True)
            (folder / str(number) / TRIMMED).touch()
            kept[number] = 0
