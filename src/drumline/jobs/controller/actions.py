"""What is under way: one task for each thing to do, and a pause after each that failed.

Deciding is repeated at every round, so the same thing is ordered again and again until it has been
seen to be done. Here it is started once, and one that raised is started again only after a while,
longer each time: a disk that is full or a bug of ours must not become a thousand tries a minute.
"""

import asyncio
import errno
import logging
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

log = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""Seconds between two tries of something that fails."""


@dataclass(frozen=True)
class _Failed:
    times: int
    again_at: float
    job_id: str | None
    said: str


class Actions:
    """Everything slow that the supervisor has begun, by a key that names it."""

    def __init__(self, clock: Callable[[], float], ended: Callable[[], None]) -> None:
        """`ended` is called after each one, done or failed."""
        self._clock = clock
        self._ended = ended
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failed: dict[str, _Failed] = {}
        self.unwritable = ""
        """Why nothing can be written down at present; empty while all is well."""

    def may_start(self, key: str) -> bool:
        """Whether it is neither under way nor resting after a failure."""
        failed = self._failed.get(key)
        return key not in self._tasks and (failed is None or self._clock() >= failed.again_at)

    def start(
        self,
        key: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        job_id: str | None = None,
    ) -> bool:
        """Run `work` in a task of its own, unless it is under way or must rest; whether it was."""
        if not self.may_start(key):
            return False
        self._tasks[key] = asyncio.create_task(self._guarded(key, work, job_id), name=key)
        return True

    async def _guarded(
        self, key: str, work: Callable[[], Coroutine[Any, Any, None]], job_id: str | None
    ) -> None:
        try:
            await work()
            self.succeeded(key)
        except Exception as trouble:
            self.failed(key, trouble, job_id)
        finally:
            self._tasks.pop(key, None)
            self._ended()

    def attempt(self, key: str, work: Callable[[], None], job_id: str | None = None) -> None:
        """Do `work` now, guarded and with the same pauses: for what takes no time."""
        if not self.may_start(key):
            return
        try:
            work()
            self.succeeded(key)
        except Exception as trouble:
            self.failed(key, trouble, job_id)

    def succeeded(self, key: str) -> None:
        """It can be done again."""
        self._failed.pop(key, None)

    def failed(self, key: str, trouble: Exception, job_id: str | None = None) -> None:
        """It rests, longer each time. The first of several failures alike brings its traceback."""
        if is_about_storage(trouble):
            self.unwritable = f"nothing can be written: {trouble}"
        before = self._failed.get(key)
        times = before.times + 1 if before else 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(times - 1, 10))
        said = f"{key} failed: {_in_words(trouble)}"
        self._failed[key] = _Failed(times, self._clock() + pause, job_id, said)
        if before is None or before.said != said:
            log.error("%s", said, exc_info=trouble)
        else:
            log.warning("%s, for the %dth time; again in %.0f s", said, times, pause)

    def under_way(self, kind: str) -> set[str]:
        """What comes after `kind` in the keys of the tasks that begin with it."""
        return {key.removeprefix(kind) for key in self._tasks if key.startswith(kind)}

    def writable_again(self) -> None:
        """There is room on the disk again: nothing needs to rest any longer."""
        self.unwritable = ""
        self._failed.clear()

    def trouble(self, job_id: str) -> str:
        """What could not be done for a job and is tried again; empty where nothing."""
        for failed in self._failed.values():
            if failed.job_id == job_id:
                return f"{failed.said}; trying again"
        return ""

    def next_try(self) -> float | None:
        """Seconds until the first of those that rest may be tried again; None where none rests."""
        now = self._clock()
        waits = [f.again_at - now for f in self._failed.values() if f.again_at > now]
        return min(waits, default=None)

    def forget(self, job_id: str) -> None:
        """Nothing more is to be done for a job."""
        self._failed = {k: f for k, f in self._failed.items() if f.job_id != job_id}

    async def close(self) -> None:
        """End them all."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def is_about_storage(trouble: Exception) -> bool:
    """Whether it says that the disk is full or cannot be written to."""
    if isinstance(trouble, sqlite3.OperationalError):
        return "disk" in str(trouble) or "readonly" in str(trouble)
    return isinstance(trouble, OSError) and trouble.errno in _NO_ROOM


_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


class Budget:
    """So many a minute, at most: the cloud limits the calls that create something."""

    def __init__(self, a_minute: float, clock: Callable[[], float]) -> None:
        """Begin with a minute's worth."""
        self._rate = a_minute
        self._clock = clock
        self._left = a_minute
        self._counted_at = clock()

    def take(self) -> bool:
        """Take one, if there is one left."""
        now = self._clock()
        self._left = min(self._rate, self._left + (now - self._counted_at) * self._rate / 60)
        self._counted_at = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


def _in_words(trouble: Exception) -> str:
    return f"{type(trouble).__name__}: {trouble}" if str(trouble) else type(trouble).__name__
