"""Remove old data, so that the home does not grow without limit.

| data | kept |
|---|---|
| events of a job | the newest 1,000; 100 once it has ended for 30 days; always the first |
| slices that were never ready | for a day, and the newest 20 of each job |
| slices that were ready | as long as their job, because they are its bill |
| slices of a job that was cleaned | for a day after they are gone |
| code archives | while an active job uses them; else for 7 days, and the newest 2 GB |

A resume repacks the code, so archives that no active job uses are only copies. Jobs, attempts,
metrics and logs stay until `clean`.
"""

import asyncio
import shutil
from collections.abc import Collection
from pathlib import Path

from drumline.hosts.code import DRAFT
from drumline.jobs.store.records import Store

DAY = 86400.0
MAX_EVENTS = 1000
OLD_SECONDS = 30 * DAY
MAX_OLD_EVENTS = 100
MAX_SLICES = 20
SLICE_SECONDS = DAY
ARCHIVE_SECONDS = 7 * DAY
MAX_ARCHIVE_BYTES = 2 * 10**9


async def prune_rows(store: Store, now: float) -> None:
    """Delete old rows, one job at a time, so that other callers need not wait."""
    for job_id, keep in store.long_histories(MAX_EVENTS, MAX_OLD_EVENTS, now - OLD_SECONDS):
        store.prune_events(job_id, keep)
        await asyncio.sleep(0)
    store.prune_slices(MAX_SLICES, now - SLICE_SECONDS)


def prune_code(folder: Path, used: Collection[str], now: float) -> None:
    """Remove old code archives and large files whose names are not in `used`."""
    archives = []
    for path in folder.iterdir():
        try:
            stat = path.stat()
        except FileNotFoundError:
            continue
        if path.name.endswith(".gz") and path.name not in used:
            archives.append((stat.st_mtime, stat.st_size, path))
    total_bytes = 0
    for modified_at, size, path in sorted(archives, reverse=True):
        total_bytes += size
        # A new archive may belong to a job that is being saved.
        over_limit = total_bytes > MAX_ARCHIVE_BYTES and modified_at < now - 3600
        if modified_at < now - ARCHIVE_SECONDS or over_limit:
            path.unlink(missing_ok=True)


def remove_drafts(folder: Path) -> None:
    """Remove incomplete archives of a previous server. Call this before packing."""
    for draft in folder.glob(f"{DRAFT}*"):
        shutil.rmtree(draft, ignore_errors=True)
