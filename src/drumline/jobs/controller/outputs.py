"""The outputs of jobs: their copies from the hosts to the home, and what is known of each copy."""

import logging
import shutil
from collections.abc import Callable, Mapping

from pydantic import BaseModel, ValidationError

from drumline.files import write_atomically
from drumline.hosts.protocol import OutputTarget, Session
from drumline.jobs.config import Config
from drumline.jobs.controller.sessions import Sessions, attempt_key
from drumline.jobs.controller.tasks import BackgroundTasks
from drumline.jobs.core.state import Job, OutputsCopy
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import Record

log = logging.getLogger(__name__)

MAX_PROBLEMS_IN_SUMMARY = 2


class HostOutputs(BaseModel):
    """The result of the newest copy from one host, as `show --json` prints it."""

    copied_at: float | None = None
    """The timestamp of the newest copy without an error; None if there is no such copy."""
    error: str = ""
    """The reason why the newest copy is not complete; empty if it is."""
    left_out: int = 0
    """The number of files that were not copied."""
    problems: list[tuple[str, str]] = []
    """The first of them, each with the reason."""


class OutputsRecord(BaseModel):
    """What is known of the outputs of a job, in a file beside its folder."""

    copied_at: float
    """The start of the newest copy."""
    attempt: int
    files: int
    """The number of stored files, over all hosts and attempts."""
    bytes: int
    hosts: dict[int, HostOutputs] = {}


class JobOutputs:
    """Copies the outputs of jobs, with at most one copy in progress per job."""

    def __init__(
        self,
        records: Mapping[str, Record],
        sessions: Sessions,
        tasks: BackgroundTasks,
        folders: Folders,
        config: Config,
        *,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        """`clock` gives order and durations, and `wall` the times for display."""
        self._records = records
        self._sessions = sessions
        self._tasks = tasks
        self._folders = folders
        self._config = config
        self._clock = clock
        self._wall = wall
        self._drafts = folders.all_outputs / ".drafts"
        self._copies: dict[str, OutputsCopy] = {}
        """The newest copy of each job that this server has completed."""
        self._newest: dict[str, OutputsRecord] = {}
        """The newest record of each active job. A full disk may not have it."""
        shutil.rmtree(self._drafts, ignore_errors=True)  # of a server that was killed

    def newest_copy(self, job: Job) -> OutputsCopy | None:
        """Return the newest copy of a job that this server has completed; None if there is none."""
        return self._copies.get(job.id)

    def start_copy(self, job: Job) -> None:
        """Start a copy unless one is in progress. Without connections, the round opens them."""
        key = attempt_key(job)
        session = self._sessions.get(key)
        if key is not None and session is not None:
            name = f"outputs {job.id}"
            self._tasks.start(name, lambda: self._copy(job.id, key[1], session), job.id)

    def forget(self, job_id: str) -> None:
        """Forget a finished job. Its files and its record stay."""
        self._copies.pop(job_id, None)
        self._newest.pop(job_id, None)

    def record(self, job_id: str) -> OutputsRecord | None:
        """Return what is known of the outputs of a job; None if none were ever copied."""
        if job_id in self._newest:
            return self._newest[job_id]
        path = self._folders.outputs_record(job_id)
        try:
            return OutputsRecord.model_validate_json(path.read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            log.warning("%s cannot be read: %s", path, error)
            return None

    async def _copy(self, job_id: str, attempt: int, session: Session) -> None:
        record = self._records.get(job_id)
        if record is None:
            return
        started_at, wall_time = self._clock(), self._wall()
        folder, max_bytes = self._folders.outputs(job_id), self._config.output_bytes
        target = OutputTarget(folder, self._drafts, max_bytes)
        seconds = self._config.timeouts.outputs
        copied = await session.copy_outputs(record.spec.outputs, target, seconds)
        last = self.record(job_id)
        result = OutputsRecord(
            copied_at=wall_time, attempt=attempt, files=copied.files, bytes=copied.bytes
        )
        for host, copy in copied.hosts.items():
            before = last.hosts.get(host) if last else None
            copied_at = before.copied_at if before and copy.error else wall_time
            result.hosts[host] = HostOutputs(
                copied_at=None if copy.error and not before else copied_at,
                error=copy.error,
                left_out=copy.left_out,
                problems=copy.problems,
            )
        if job_id in self._records:
            summary = summarize(result, str(folder))
            self._copies[job_id] = OutputsCopy(started_at, self._clock(), summary)
            self._newest[job_id] = result
        elif not folder.exists():
            return  # the job has finished without outputs, or its user has deleted them
        try:
            write_atomically(self._folders.outputs_record(job_id), result.model_dump_json())
        except OSError as error:
            log.warning("the record of the outputs of %s is not saved: %s", job_id, error)


def summarize(record: OutputsRecord, folder: str) -> str:
    """Return a sentence such as `3 files are in DIR (1.2 MB); host 1: no answer`."""
    if record.files:
        verb = "file is" if record.files == 1 else "files are"
        parts = [f"{record.files:,} {verb} in {folder} ({_format_size(record.bytes)})"]
    else:
        parts = ["no file of the job matches"]
    lines = problems(record)
    if len(lines) > MAX_PROBLEMS_IN_SUMMARY:
        more = len(lines) - MAX_PROBLEMS_IN_SUMMARY + 1
        lines[MAX_PROBLEMS_IN_SUMMARY - 1 :] = [f"{more} more problems, see show"]
    return "; ".join(parts + lines)


def _format_size(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size:,} bytes"


def problems(record: OutputsRecord) -> list[str]:
    """Return what could not be copied, each once with its hosts."""
    hosts_of: dict[str, list[int]] = {}
    for index, host in sorted(record.hosts.items()):
        lines = [host.error] if host.error else []
        lines += [f"{name} was not copied: {reason}" for name, reason in host.problems]
        if host.left_out > len(host.problems):
            lines.append(f"{host.left_out - len(host.problems):,} more files were not copied")
        for line in lines:
            hosts_of.setdefault(line, []).append(index)
    return [
        f"host{'s' * (len(hosts) > 1)} {', '.join(map(str, hosts))}: {line}"
        for line, hosts in hosts_of.items()
    ]
