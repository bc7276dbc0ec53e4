"""What is forgotten, and when: nothing that a user would miss, and nothing that grows for ever.

| what | is kept |
|---|---|
| events of a job | the newest 1,000; 100 once it has ended for 30 days; always the first |
| slices that were asked for and never came | a day, and the newest 20 of each job |
| slices that came | as long as their job: they are its bill |
| slices of a job that was cleaned | a day after they were seen gone |
| code archives | while a job that has not ended uses them; else 7 days, 2 GB of the newest |

A resume packs the code again, so an archive that no such job uses is only a copy. Jobs, attempts,
metrics and logs stay until `clean`.
"""

import asyncio
import shutil
from collections.abc import Collection
from pathlib import Path

from drumline.hosts.code import DRAFT
from drumline.jobs.store.records import Store

DAY = 86400.0
EVENTS = 1000
OLD = 30 * DAY
OLD_EVENTS = 100
SLICES = 20
SLICE_AGE = DAY
CODE_AGE = 7 * DAY
CODE_BYTES = 2 * 10**9


async def prune_rows(store: Store, now: float) -> None:
    """Delete old rows, a job at a time so that no caller waits for it."""
    for job_id, keep in store.long_histories(EVENTS, OLD_EVENTS, now - OLD):
        store.prune_events(job_id, keep)
        await asyncio.sleep(0)
    store.prune_slices(SLICES, now - SLICE_AGE)


def prune_code(folder: Path, used: Collection[str], now: float) -> None:
    """Remove code archives that no job needs; `used` are the hashes of those still needed."""
    found = []
    for path in folder.iterdir():
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue
        if path.name.endswith(".tar.gz") and path.name.removesuffix(".tar.gz") not in used:
            found.append((facts.st_mtime, facts.st_size, path))
    total = 0
    for written, size, path in sorted(found, reverse=True):
        total += size
        # An archive that was just packed may belong to a job that is being saved.
        beyond = total > CODE_BYTES and written < now - 3600
        if written < now - CODE_AGE or beyond:
            path.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Remove archives that an earlier server left unfinished; call this before packing any."""
    for draft in folder.glob(f"{DRAFT}*"):
        shutil.rmtree(draft, ignore_errors=True)
