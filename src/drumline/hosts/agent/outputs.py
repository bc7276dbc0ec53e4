"""The outputs of a job: files of its working copy, listed and sent to the server.

The server asks for the list, compares it with the files that it has, and asks for those that
differ. Links are not followed out of the working copy. Files of the code that the program has not
changed are no outputs: on a new slice, they would replace newer ones of an earlier attempt.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import json
import os
import stat

from .code import unpacked_files
from .environment import find_program
from .files import below_root, open_file
from .log import CHUNK_BYTES
from .wire import OutputChunk, OutputList, OutputPaths, OutputRequest, receive_message, send

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FILES = 10_000
"""The number of files of one host that are listed."""
MAX_LIST_BYTES = 4_000_000
"""The size of the list, which is one message."""
MAX_PROBLEMS = 20
"""The number of files that are listed with the reason why they cannot be copied."""
MAX_DEPTH = 400
"""The depth of folders that are listed. Each takes a call of Python, which allows 1,000."""
MAGIC = frozenset("*?[")


class Listing:
    """The outputs found so far."""

    def __init__(self, work: str) -> None:
        """List files of the working copy `work`."""
        self.work = work
        self.root = os.path.realpath(work)
        self.code = unpacked_files(work)
        self.names: set[str] = set()
        self.files: list[tuple[str, int, int]] = []
        self.problems: list[tuple[str, str]] = []
        self.left_out = 0
        """The number of files that cannot be copied, with those beyond MAX_PROBLEMS."""
        self.full = False
        """True if there are more files than are listed."""
        self._bytes = 0

    def add(self, name: str) -> None:
        """Add a file, or all files of a folder."""
        if name in self.names or self.full:
            return
        path = os.path.join(self.work, name)
        try:
            status = os.lstat(path)
            if stat.S_ISDIR(status.st_mode):
                if name.count("/") >= MAX_DEPTH:
                    raise OSError("its folder is too deep")
                for entry in self.entries(name):
                    self.add(os.path.join(name, entry))
                return
            self.names.add(name)
            if stat.S_ISLNK(status.st_mode):
                if not self.contains(path):
                    raise OSError("a link to a file outside the folder of the program")
                status = os.stat(path)
                if stat.S_ISDIR(status.st_mode):
                    return  # its files are listed under their own names
            if not stat.S_ISREG(status.st_mode):
                raise OSError("not a file")
            name.encode()
        except UnicodeEncodeError:
            self.leave_out(name.encode("utf-8", "replace").decode(), "its name is not UTF-8")
        except OSError as error:
            self.leave_out(name, error.strerror or str(error))
        else:
            self._add_file(name, status)

    def contains(self, path: str) -> bool:
        """Return True if a path, with all links resolved, is in the working copy."""
        return os.path.realpath(path).startswith(self.root + os.sep)

    def entries(self, name: str) -> list[str]:
        """Return the names in a folder, in order. A folder that cannot be read has none."""
        try:
            return sorted(os.listdir(os.path.join(self.work, name)))
        except OSError as error:
            self.leave_out(name, error.strerror or str(error))
            return []

    def is_folder(self, name: str) -> bool:
        """Return True for a folder that is not a link."""
        try:
            return stat.S_ISDIR(os.lstat(os.path.join(self.work, name)).st_mode)
        except OSError:
            return False

    def leave_out(self, name: str, reason: str) -> None:
        """Record a file that cannot be copied."""
        self.left_out += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append((name[:1000], reason[:200]))

    def _add_file(self, name: str, status: os.stat_result) -> None:
        if self.code.get(name) == [status.st_size, status.st_mtime_ns]:
            return
        entry = (name, status.st_size, status.st_mtime_ns)
        self._bytes += len(json.dumps(entry)) + 2
        if len(self.files) >= MAX_FILES or self._bytes > MAX_LIST_BYTES:
            self.full = True
            return
        self.files.append(entry)


def list_outputs(folder: str) -> None:
    """Send the list of the outputs that these paths name."""
    message = receive_message(OutputPaths)
    program = find_program(folder)
    if program is None:
        send(OutputList(files=()))
        return
    listing = Listing(below_root(program.work))
    for path in message.paths:
        for name in expand(listing, "", path.strip("/").split("/")):
            listing.add(name)
    send(
        OutputList(
            files=tuple(listing.files),
            problems=tuple(listing.problems),
            left_out=listing.left_out,
            full=listing.full,
        )
    )


def expand(listing: Listing, folder: str, parts: list[str]) -> Iterator[str]:
    """Yield the files and folders below a folder that the parts of a path name.

    `*` does not match hidden names, as in a shell, and `**/` matches any number of folders.
    """
    while parts[:2] == ["**", "**"]:  # means the same as one, and would take far longer
        parts = parts[1:]
    part, rest = parts[0], parts[1:]
    if part == "**" and rest:
        yield from expand(listing, folder, rest)
        for name in listing.entries(folder):
            path = os.path.join(folder, name)
            enterable = not name.startswith(".") and path.count("/") < MAX_DEPTH
            if enterable and listing.is_folder(path):
                yield from expand(listing, path, parts)
        return
    if MAGIC & set(part):
        hidden = part.startswith(".")
        names = [
            name
            for name in listing.entries(folder)
            if fnmatch.fnmatchcase(name, part) and (hidden or not name.startswith("."))
        ]
    else:
        names = [part]
    for name in names:
        path = os.path.join(folder, name)
        if rest and listing.is_folder(path):
            yield from expand(listing, path, rest)
        elif not rest and os.path.lexists(os.path.join(listing.work, path)):
            yield path


def send_outputs(folder: str) -> None:
    """Send the content of files in pieces: exactly the requested size of each, or an error."""
    request = receive_message(OutputRequest)
    program = find_program(folder)
    listing = Listing(below_root(program.work if program else "work"))
    for index, (name, size) in enumerate(request.files):
        try:
            send_file(listing, index, name, size)
        except OSError as error:
            send(OutputChunk(index=index, error=error.strerror or str(error)))
    send(OutputChunk(done=True))


def send_file(listing: Listing, index: int, name: str, size: int) -> None:
    """Send the first `size` bytes of a file. It may have grown since it was listed."""
    path = os.path.join(listing.work, name)
    if not listing.contains(path):
        raise OSError("not in the folder of the program")
    with contextlib.closing(open_file(os.path.realpath(path))) as file:
        remaining = size
        while True:
            data = file.read(min(CHUNK_BYTES, remaining))
            if len(data) < min(CHUNK_BYTES, remaining):
                raise OSError("it became shorter while it was copied")
            send(OutputChunk(index=index, data=base64.b64encode(data).decode()))
            remaining -= len(data)
            if not remaining:
                return
