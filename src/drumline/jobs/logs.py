"""Reading the logs that the server keeps of every host and attempt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.jobs.state import Job

if TYPE_CHECKING:
    from drumline.jobs.desk import Desk

CHUNK = 1 << 16
POLL = 0.2


class _Tail:
    """One log file, read as far as it has come. With a prefix, whole lines only."""

    def __init__(self, path: Path, prefix: bytes) -> None:
        self._path, self._prefix, self._offset, self._rest = path, prefix, 0, b""

    def read(self, ended: bool) -> bytes:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(new)
        if not self._prefix:
            return new
        lines = (self._rest + new).split(b"\n")
        self._rest = lines.pop()
        if ended and self._rest:
            lines.append(self._rest)
            self._rest = b""
        return b"".join(self._prefix + line + b"\n" for line in lines)


async def stream_logs(
    desk: "Desk", job_id: str, *, host: str, attempt: int | None, follow: bool
) -> AsyncIterator[bytes]:
    """The log of one host, or of all with the host's number before each line.

    With `follow` and no attempt named, goes on through later attempts until the job has ended.
    """
    from drumline.jobs.verbs import Mistake

    record = desk.record(job_id)
    number = attempt or max(record.job.attempts, 1)
    folder = desk.folders.logs(record.job.id)
    if attempt is not None and attempt > record.job.attempts:
        raise Mistake(f"{record.job.id} has {record.job.attempts} attempts, not {attempt}", 404)
    if host != "all" and not host.isdecimal():
        raise Mistake(f"host: {host!r} is neither a number nor all")
    hosts = _hosts(record.job, number, folder / str(number))
    if host != "all" and int(host) >= hosts:
        has = "one host, 0" if hosts == 1 else f"hosts 0 to {hosts - 1}"
        raise Mistake(f"host: {record.job.id} has no host {int(host)}; it has {has}", 404)
    tails: dict[tuple[int, str], _Tail] = {}
    while True:
        now = desk.supervisor.record(record.job.id)
        latest = now.job.attempts if now and attempt is None else number
        ended = now is None or now.job.status.ended or now.job.attempts > number
        for one in range(number, max(latest, number) + 1):
            for path in _files(folder / str(one), host):
                key = (one, path.name)
                if key not in tails:
                    several = len(_files(folder / str(one), "all")) > 1
                    prefix = f"[{path.stem.replace('-', ' ')}] ".encode()
                    tails[key] = _Tail(path, prefix if host == "all" and several else b"")
                text = tails[key].read(ended or one < latest)
                if text:
                    yield text
        number = max(latest, number)
        if not follow or (ended and latest == number):
            return
        await asyncio.sleep(POLL)


def _hosts(job: Job, attempt: int, folder: Path) -> int:
    """How many hosts may have a log of this attempt, or of a later one that goes on from it.

    While the slice is there it says so itself, since a host may not have written yet.
    """
    under_way = attempt == job.attempts and job.attempt is not None
    if under_way and job.slice is not None:
        return job.slice.hosts
    written = len(_files(folder, "all"))
    most = max(choice.hosts for choice in job.choices)
    gone = attempt < job.attempts or job.status.ended
    return (written or most) if gone else most


def _files(folder: Path, host: str) -> list[Path]:
    if host != "all":
        path = folder / f"host-{int(host)}.log"
        return [path] if path.exists() else []
    return sorted(folder.glob("host-*.log"), key=lambda p: int(p.stem.rpartition("-")[2]))
