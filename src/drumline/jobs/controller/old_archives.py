"""Archives of living jobs that an older version packed are made safe before any is sent again.

They may hold keys and secrets. What the packing rules leave out today is left out of a new archive;
one that cannot be read is kept as it is, and `program_of` refuses to send it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.hosts.packing.rules import RULES, CodeError, left_out_json, left_out_line
from drumline.jobs.core.state import Decision, Event
from drumline.jobs.store.records import Record
from drumline.jobs.store.specs import StoredSpec

if TYPE_CHECKING:
    from drumline.hosts.code import Archive

log = logging.getLogger(__name__)

Change = Callable[[str, Callable[[Record], Decision | None], StoredSpec | None], object]
"""`Supervisor.change`."""


async def make_safe(records: Mapping[str, Record], folder: Path, change: Change) -> None:
    """Repack the archives of these jobs that were not packed by today's rules."""
    for job_id, record in list(records.items()):
        packed = record.spec.archive
        if packed is None or packed.rules >= RULES:
            continue
        from drumline.hosts.packing.repack import repack

        try:
            renewed = await asyncio.to_thread(repack, folder / f"{packed.sha}.tar.gz")
        except (CodeError, OSError) as error:
            log.warning("the code of job %s: %s", job_id, error)
            continue
        current = records.get(job_id)
        # A resume may have packed the code again meanwhile.
        if current is not None and current.spec.archive == packed:
            try:
                _record(current, renewed, change)
            except Exception:  # the disk may be full; the other jobs go on
                log.exception("the code of job %s could not be recorded", job_id)


def _record(record: Record, renewed: "Archive | None", change: Change) -> None:
    """Save that the archive of a job is safe, and what was left out of it."""
    left_out = left_out_json(renewed.left_out if renewed else ())
    archive: dict[str, Any] = {**record.spec.given["archive"], "rules": RULES, **left_out}
    events: tuple[Event, ...] = ()
    if renewed is not None:
        archive |= {
            "sha": renewed.sha256,
            "files": renewed.files,
            "bytes": renewed.bytes,
        }
        events = (Event("warning", f"code of an older version: {left_out_line(left_out)}"),)
    spec = StoredSpec.of({**record.spec.given, "archive": archive})
    change(record.job.id, lambda now: Decision(now.job, events=events), spec)
