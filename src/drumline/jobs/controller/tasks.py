"""Background tasks: one for each action in progress, and a backoff after each that failed.

`decide` returns the same effect in every round until its result is observed. Here each action is
started once. An action that raised is retried after a backoff that grows each time, so that a full
disk or a bug does not cause a thousand tries a minute. An action of a job that fails because of a
bug is given up after a few tries, because only a new version can help.
"""

import asyncio
import errno
import logging
import math
import sqlite3
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.cancellation import cancel_tasks
from drumline.errors import CloudError, HostError, UserError

log = logging.getLogger(__name__)

FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
"""The most seconds between two tries of an action that fails."""


MAX_TRIES = 8
"""The tries of a job's action that fails because of a bug, in about two minutes. Early tries may
have come at a bad moment."""


@dataclass(frozen=True)
class _Failure:
    count: int
    retry_at: float
    job_id: str | None
    message: str


class BackgroundTasks:
    """The slow actions of the supervisor, each under a key."""

    def __init__(
        self,
        clock: Callable[[], float],
        on_end: Callable[[], None],
        give_up: Callable[[str, str], None] = lambda _job_id, _message: None,
    ) -> None:
        """`on_end` is called after each task, whether it succeeded or failed.

        `give_up` is called with a job and a message if an action of the job fails because of a bug
        each time. The action is not retried before the job is forgotten.
        """
        self._give_up = give_up
        self._clock = clock
        self._on_end = on_end
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, _Failure] = {}
        self.disk_error = ""
        """The reason why the disk cannot be written to now; empty if it can."""

    def may_start(self, key: str) -> bool:
        """Return True if the action is neither in progress nor in a backoff."""
        failure = self._failures.get(key)
        return key not in self._tasks and (failure is None or self._clock() >= failure.retry_at)

    def start(
        self,
        key: str,
        work: Callable[[], Coroutine[Any, Any, None]],
        job_id: str | None = None,
    ) -> bool:
        """Run `work` in a new task. Return False if it is in progress or in a backoff."""
        if not self.may_start(key):
            return False
        self._tasks[key] = asyncio.create_task(self._run_task(key, work, job_id), name=key)
        return True

    async def _run_task(
        self, key: str, work: Callable[[], Coroutine[Any, Any, None]], job_id: str | None
    ) -> None:
        try:
            await work()
            self._failures.pop(key, None)
        except Exception as error:
            self.record_failure(key, error, job_id)
        finally:
            self._tasks.pop(key, None)
            self._on_end()

    def run_now(self, key: str, work: Callable[[], None], job_id: str | None = None) -> None:
        """Run `work` here, with the same handling of errors. It must not take long."""
        if not self.may_start(key):
            return
        try:
            work()
            self._failures.pop(key, None)
        except Exception as error:
            self.record_failure(key, error, job_id)

    def record_failure(self, key: str, error: Exception, job_id: str | None = None) -> None:
        """Begin a backoff. Only the first of equal failures logs a traceback."""
        if is_disk_error(error):
            self.disk_error = f"nothing can be written: {error}"
        last = self._failures.get(key)
        count = last.count + 1 if last else 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(count - 1, 10))
        name = type(error).__name__
        message = f"{key} failed: {name}: {error}" if str(error) else f"{key} failed: {name}"
        gives_up = job_id is not None and count >= MAX_TRIES and is_bug(error)
        retry_at = math.inf if gives_up else self._clock() + pause
        self._failures[key] = _Failure(count, retry_at, job_id, message)
        if last is None or last.message != message:
            log.error("%s", message, exc_info=error)
        else:
            log.warning("%s, for the %dth time; again in %.0f s", message, count, pause)
        if gives_up and job_id is not None:
            text = f"internal error in drumline ({error_place(error)}): {message}; see server.log;"
            try:
                self._give_up(job_id, f"{text} drumline resume {job_id} tries again")
            except Exception:
                log.exception("job %s could not be ended after an internal error", job_id)

    def keys_in_progress(self, prefix: str) -> set[str]:
        """Return the keys of the running tasks that begin with a prefix, without it."""
        return {key.removeprefix(prefix) for key in self._tasks if key.startswith(prefix)}

    def disk_recovered(self) -> None:
        """End all backoffs, because the disk is writable."""
        self.disk_error = ""
        self._failures.clear()

    def error_of(self, job_id: str) -> str:
        """Return the failure of a job's action that will be retried; empty if there is none."""
        for failure in self._failures.values():
            if failure.job_id == job_id:
                given_up = math.isinf(failure.retry_at)
                return f"{failure.message}; {'see server.log' if given_up else 'trying again'}"
        return ""

    def next_retry(self) -> float | None:
        """Return the seconds until the next retry; None if there is none."""
        now = self._clock()
        waits = [f.retry_at - now for f in self._failures.values() if now < f.retry_at < math.inf]
        return min(waits, default=None)

    def forget(self, job_id: str) -> None:
        """Forget the failures of a job that needs no further action."""
        self._failures = {k: f for k, f in self._failures.items() if f.job_id != job_id}

    async def close(self) -> None:
        """Cancel all tasks, and wait for their ends for a limited time."""
        await cancel_tasks([*self._tasks.values()])


_DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}


def is_disk_error(error: Exception) -> bool:
    """Return True if the disk is full or cannot be written to."""
    if isinstance(error, sqlite3.OperationalError):
        return "disk" in str(error) or "readonly" in str(error)
    return isinstance(error, OSError) and error.errno in _DISK_ERRORS


def is_bug(error: Exception) -> bool:
    """Return True if Drumline itself caused an error, and not its disk, a host or the cloud."""
    return not isinstance(error, OSError | sqlite3.Error | CloudError | HostError | UserError)


def error_place(error: Exception) -> str:
    """Return the place in the code where an error was raised: `lifecycle.py:120`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "unknown place"


class RateLimit:
    """A limit on calls per minute, because the cloud limits calls that create resources."""

    def __init__(self, calls_per_minute: float, clock: Callable[[], float]) -> None:
        """Start with the calls of one minute."""
        self._calls_per_minute = calls_per_minute
        self._clock = clock
        self._available = calls_per_minute
        self._updated_at = clock()

    def take(self) -> bool:
        """Take one call. Return False if none is available."""
        now = self._clock()
        new = (now - self._updated_at) * self._calls_per_minute / 60
        self._available = min(self._calls_per_minute, self._available + new)
        self._updated_at = now
        if self._available < 1:
            return False
        self._available -= 1
        return True
