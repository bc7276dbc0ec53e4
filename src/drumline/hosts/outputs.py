"""Copies of the outputs of a job, in one folder of this machine with a folder for each host.

A file is complete or not there: it is written to a draft, which replaces the previous version by a
rename. It gets the time of change that it has on its host, so the copies themselves show which
files have changed since. Hosts run the user's code, so every name and size of a host is checked.
"""

import asyncio
import base64
import binascii
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Self

from drumline.errors import HostError
from drumline.hosts.agent import wire
from drumline.hosts.connection import AgentError
from drumline.hosts.protocol import MAX_PROBLEMS, HostCopy, OutputTarget
from drumline.hosts.remote import RemoteAgent

MAX_NAME_BYTES, MAX_PART_BYTES = 1000, 240
"""The limits of a name and of its parts. File systems allow 255 bytes for a part."""
MAX_SIZE, MAX_TIME = 1 << 50, 1 << 62
SILENCE_SECONDS = 30.0
"""Seconds without a piece of a file after which a host is given up."""


class CopyError(HostError):
    """A copy cannot be stored on this machine."""


@dataclass(frozen=True)
class Output:
    """A file on a host."""

    name: str
    size: int
    changed_ns: int


class OutputFolder:
    """The outputs of a job on this machine, for one copy from all its hosts."""

    def __init__(self, target: OutputTarget) -> None:
        """`begin` measures the files that the folder has."""
        self.folder = target.folder
        self._drafts = target.drafts
        self._max_bytes = target.max_bytes
        self._free_bytes = 0

    async def begin(self) -> None:
        """Measure the space that is left within the limit."""
        _, size = await self.measure()
        self._free_bytes = self._max_bytes - size

    async def measure(self) -> tuple[int, int]:
        """Return the number and size of the files."""
        return await asyncio.to_thread(_measure, self.folder)

    async def copy(
        self, agent: RemoteAgent, attempt: str, paths: Sequence[str], host: int, result: HostCopy
    ) -> None:
        """Copy the files of one host that are new or have changed.

        Raises the errors of connections, AgentError, and CopyError if this disk refuses a file.
        """
        message = wire.OutputPaths(paths=list(paths))
        async with asyncio.timeout(4 * SILENCE_SECONDS):
            listing = await agent.ask(wire.OutputList, wire.LIST_OUTPUTS, attempt, message=message)
        target = self.folder / f"host-{host}"
        result.problems, result.left_out = [], 0
        for name, reason in listing.problems[:MAX_PROBLEMS]:
            result.leave_out(name, reason)
        result.left_out = max(result.left_out, min(listing.left_out, MAX_SIZE))
        result.error = f"only the first {len(listing.files):,} files" if listing.full else ""
        files = list(_valid(listing.files, result.leave_out))
        changed = await asyncio.to_thread(lambda: list(_changed(files, target)))
        wanted = []
        # Small files first, so that one huge file does not take the space of all others.
        for file, old_size in sorted(changed, key=lambda pair: pair[0].size):
            if file.size - old_size > self._free_bytes:
                limit = f"{self._max_bytes / 1e6:,.0f} MB for each job"
                reason = f"{file.size / 1e6:,.1f} MB do not fit into the limit of {limit}"
                result.leave_out(file.name, f"{reason} (output_megabytes in config.yaml)")
                continue
            self._free_bytes -= file.size - old_size
            wanted.append(file)
        if wanted:
            await self._receive(agent, attempt, wanted, target, result)

    async def _receive(
        self,
        agent: RemoteAgent,
        attempt: str,
        files: Sequence[Output],
        target: Path,
        result: HostCopy,
    ) -> None:
        """Receive files in their order, each into a draft that replaces the previous version."""
        request = [(file.name, file.size) for file in files]
        position = 0
        with _Draft(self._drafts / f"{self.folder.name}-{target.name}") as draft:
            async with contextlib.aclosing(agent.send_outputs(attempt, request)) as chunks:
                while position < len(files):
                    async with asyncio.timeout(SILENCE_SECONDS):
                        chunk = await anext(chunks, None)
                    if chunk is None or chunk.done:
                        raise AgentError("the host did not send all files")
                    if chunk.index != position:
                        raise AgentError("the host sent a file that was not requested")
                    # Messages that have arrived do not suspend this task.
                    await asyncio.sleep(0)
                    file = files[position]
                    if chunk.error:
                        result.leave_out(file.name, chunk.error)
                        draft.begin()
                        position += 1
                        continue
                    draft.write(_decode(chunk.data))
                    if draft.size > file.size or (not chunk.data and file.size):
                        raise AgentError("the host sent another size than it listed")
                    if draft.size == file.size:
                        self._finish(draft, target, file, result)
                        position += 1

    def _finish(self, draft: "_Draft", target: Path, file: Output, result: HostCopy) -> None:
        """Put a complete file in its place."""
        try:
            draft.replace(target / file.name, file.changed_ns)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            reason = "an earlier copy has a folder and a file where this one has the opposite"
            result.leave_out(file.name, f"{reason}; rename {target}")
            draft.begin()
        else:
            result.files += 1
            result.bytes += file.size


class _Draft:
    """A file that is not complete yet. Errors of this disk are raised as CopyError."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.size = 0

    def __enter__(self) -> Self:
        with _local_errors():
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def begin(self) -> None:
        """Begin the next file."""
        with contextlib.suppress(OSError):
            self._close()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Append to the file."""
        with _local_errors():
            if self._file is None:
                self._file = self._path.open("wb")
            self._file.write(data)
        self.size += len(data)

    def replace(self, path: Path, changed_ns: int) -> None:
        """Replace a file by the draft. Raises OSError if `path` is a folder, or below a file."""
        with _local_errors():
            self._close()
            os.utime(self._path, ns=(changed_ns, changed_ns))
            path.parent.mkdir(parents=True, exist_ok=True)
            self._path.replace(path)
        self.begin()


@contextlib.contextmanager
def _local_errors() -> Iterator[None]:
    try:
        yield
    except (FileExistsError, NotADirectoryError, IsADirectoryError):
        raise
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CopyError(f"this machine cannot store more: {reason}") from error


def _measure(folder: Path) -> tuple[int, int]:
    """Return the number and size of the files in a folder."""
    files = size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                files, size = files + 1, size + os.lstat(os.path.join(parent, name)).st_size
    return files, size


def _valid(
    entries: Iterable[tuple[str, int, int]], leave_out: Callable[[str, str], None]
) -> Iterable[Output]:
    """Yield the files whose names stay below the folder of their host."""
    seen = set()
    for name, size, changed_ns in entries:
        parts = name.split("/")
        outside = any(part in {"", ".", ".."} for part in parts)
        too_long = len(name.encode()) > MAX_NAME_BYTES or any(
            len(part.encode()) > MAX_PART_BYTES for part in parts
        )
        if outside or not name.isprintable():
            leave_out(name, "its name has unprintable characters or leaves the folder")
        elif too_long:
            leave_out(name, "its name is too long")
        elif not (0 <= size <= MAX_SIZE and 0 <= changed_ns <= MAX_TIME):
            leave_out(name, "its size or its time of change is invalid")
        elif name not in seen:
            seen.add(name)
            yield Output(name, size, changed_ns)


def _changed(files: Iterable[Output], target: Path) -> Iterable[tuple[Output, int]]:
    """Yield the files that differ from their copies, each with the size of its copy."""
    for file in files:
        try:
            status = os.lstat(target / file.name)
        except OSError:
            yield file, 0
            continue
        if (status.st_size, status.st_mtime_ns) != (file.size, file.changed_ns):
            yield file, status.st_size


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error) as error:
        raise AgentError("the host sent a piece of a file that is not base64") from error
