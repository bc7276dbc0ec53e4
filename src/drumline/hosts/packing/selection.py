"""Decides for each file of a working folder if it is sent.

`pack` and `measure` both use `Selection.files`. A file is opened once, without following links in
its path. The decision uses the status of this descriptor and the same bytes that go to the archive,
so it also holds for a file that changes at the same time.
"""

import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from drumline.hosts.packing.content import Content
from drumline.hosts.packing.contents import SecretScan
from drumline.hosts.packing.folders import (
    DRUMLINE_HOME,
    MOUNT,
    OWN_CHECKPOINT,
    FolderRules,
    require_workdir,
)
from drumline.hosts.packing.listing import ALWAYS_IGNORED, PACKAGE_FOLDER, list_files
from drumline.hosts.packing.names import secret_file, secret_folder
from drumline.hosts.packing.rules import (
    INTERRUPTED,
    OWNER_ONLY,
    UNREADABLE,
    CodeError,
    LeftOut,
    PackingRules,
    archive_time,
    printable,
)

if TYPE_CHECKING:
    from pathspec import GitIgnoreSpec

READ_BYTES = 1 << 20
"""The number of bytes of one read."""
_TARGET_BYTES = 4 << 20
"""The maximum number of bytes to read of a file outside the folder to which a link points."""
_NEVER_INCLUDED = ALWAYS_IGNORED | {"", ".", PurePosixPath(PACKAGE_FOLDER).parts[0]}
_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC | getattr(os, "O_PATH", os.O_RDONLY)
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass(frozen=True)
class SelectedFile:
    """A file or link to be sent."""

    entry: tarfile.TarInfo
    content: Content | None
    """The bytes, until the next file; None for a link, or if they are not kept."""


@dataclass(frozen=True)
class _OpenFile:
    """An open file and its status."""

    descriptor: int
    status: os.stat_result
    private_folder: str | None
    """The first parent folder that only its owner can read."""


@dataclass
class PackingProgress:
    """The progress of reading the files, for another thread."""

    bytes: int = 0
    total: int = 0
    """The size of all files, from before they are read."""
    cancelled: bool = False
    """True if the caller no longer needs the archive."""


Verdict = LeftOut | tarfile.TarInfo | None
"""The decision about a file; None if it does not exist or is not a regular file."""


class Selection:
    """The files of a working folder to send, and the files that are left out."""

    def __init__(
        self,
        folder: Path,
        rules: PackingRules,
        max_bytes: int,
        progress: PackingProgress | None = None,
    ) -> None:
        """Raise CodeError if the folder must not be sent or is larger than `max_bytes`."""
        require_workdir(folder, rules.home, rules.environ)
        if not folder.is_dir():
            raise CodeError(f"code: {folder} is not a folder")
        self._folder = folder
        self._root = os.path.realpath(folder)
        self._rules = rules
        self._max_bytes = max_bytes
        self._progress = progress or PackingProgress()
        self._folders = FolderRules(self._root, rules)
        self._left_out: dict[str, LeftOut] = {}
        self._patterns = _patterns(rules.include)
        names = list_files(Path(self._root), self._skip)
        self._names = self._add_included(names)
        self.expected_sizes = self._sizes()
        """The sizes of the files before any of them is read. A few may then be left out."""
        self._progress.total = sum(self.expected_sizes.values())
        self._require_size()

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The files and folders that are not sent, sorted; complete once `files` has ended."""
        return tuple(self._left_out[path] for path in sorted(self._left_out))

    def files(self, new_content: Callable[[], Content] | None = None) -> Iterator[SelectedFile]:
        """Read every file and yield those to send.

        `new_content` creates the content of one file. Without it, the bytes are not kept.
        Raises CodeError if only the owner can read the files.
        """
        sent, total = 0, 0
        for name in self._names:
            content = new_content() if new_content else None
            try:
                verdict = self._decide(name, content, self._max_bytes - total)
                if isinstance(verdict, LeftOut):
                    self._left_out.setdefault(verdict.path, verdict)
                elif verdict is None and name in self._rules.include:
                    raise CodeError(
                        f"include: {printable(name)} cannot be sent, because it is not a regular "
                        "file or is reached through a link"
                    )
                elif verdict is not None:
                    sent += verdict.isreg()
                    total += verdict.size
                    yield SelectedFile(verdict, content if verdict.isreg() else None)
            finally:
                if content is not None:
                    content.discard()
        if not os.path.isdir(self._root):
            raise CodeError(f"code: {self._folder} was removed while it was packed")
        if not sent and any(entry.reason == OWNER_ONLY for entry in self._left_out.values()):
            raise CodeError(
                f"code: every file in {self._folder} is readable by you alone and would be left "
                f"out; run chmod -R go+rX {self._folder}, or name the files to send under "
                'include:, such as include: ["*.py"]'
            )

    # One file -----------------------------------------------------------------------------------

    def _decide(self, name: str, content: Content | None, max_bytes: int) -> Verdict:
        """Decide about a file or link. The bytes that are read go to `content`."""
        components = name.split("/")
        folder_verdict = self._folders.verdict("/".join(components[:-1]))
        included = name in self._rules.include
        if folder_verdict is not None and not (included and folder_verdict.overridable):
            return folder_verdict.left_out
        path = os.path.join(self._root, name)
        if self._folders.is_mount(path):
            return LeftOut(name, MOUNT)
        if os.path.islink(path):
            return self._decide_link(name, included=included)
        try:
            with self._open(components) as file:
                return self._decide_file(file, name, content, max_bytes)
        except (FileNotFoundError, _NotAFileError):
            return None
        except PermissionError:
            if included:
                raise CodeError(f"include: {printable(name)} is {UNREADABLE}") from None
            return LeftOut(name, UNREADABLE)
        except OSError as error:
            raise CodeError(
                f"code: {printable(name)} cannot be read ({error.strerror}); if it changed while "
                "it was being packed, try again"
            ) from None

    def _decide_file(
        self, file: _OpenFile, name: str, content: Content | None, max_bytes: int
    ) -> LeftOut | tarfile.TarInfo:
        """Read an open file once and decide about it."""
        components, status = name.split("/"), file.status
        included = name in self._rules.include
        if status.st_nlink > 1 and (status.st_dev, status.st_ino) in self._folders.files_of_homes:
            return LeftOut(name, DRUMLINE_HOME)
        private = None
        if file.private_folder is not None or not status.st_mode & 0o044:
            matches_pattern = self._patterns is not None and self._patterns.match_file(name)
            if not (included or matches_pattern):
                private = LeftOut(file.private_folder or name, OWNER_ONLY)
        name_reason = secret_file(components)
        scan, size = SecretScan(components), 0
        while data := os.read(file.descriptor, READ_BYTES):
            size += len(data)
            if size > max_bytes:
                if (name_reason or private) and not included:
                    break
                raise CodeError(
                    f"code: {self._folder} holds more than {format_size(self._max_bytes)} since "
                    f"{printable(name)} has grown; try again, or add it to .drumlineignore"
                )
            self._progress.bytes += len(data)
            if self._progress.cancelled:
                raise CodeError(INTERRUPTED)
            scan.feed(data)
            if content is not None:
                content.write(data)
        reason = scan.reason() or name_reason
        if reason is not None and not included:
            return LeftOut(name, reason)
        if private is not None:
            return private
        entry = tarfile.TarInfo(name)
        entry.size = size
        entry.mode = 0o755 if status.st_mode & 0o100 else 0o644
        entry.mtime = archive_time(status)
        return entry

    @contextmanager
    def _open(self, components: list[str]) -> Iterator[_OpenFile]:
        """Open a file folder by folder from the root, without following links."""
        private = None
        folder_descriptor = os.open(self._root, _FOLDER & ~os.O_NOFOLLOW)
        try:
            for depth, component in enumerate(components[:-1], 1):
                if stat.S_ISLNK(_status(component, folder_descriptor).st_mode):
                    raise _NotAFileError  # the link has an entry of its own
                child = os.open(component, _FOLDER, dir_fd=folder_descriptor)
                os.close(folder_descriptor)
                folder_descriptor = child
                if private is None and not os.fstat(folder_descriptor).st_mode & 0o055:
                    private = "/".join(components[:depth]) + "/"
            # Opening a device or a pipe may have effects, so check the type first.
            mode = _status(components[-1], folder_descriptor).st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISLNK(mode):
                raise _NotAFileError
            descriptor = os.open(components[-1], _FILE, dir_fd=folder_descriptor)
        finally:
            os.close(folder_descriptor)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _NotAFileError
            yield _OpenFile(descriptor, status, private)
        finally:
            os.close(descriptor)

    # Links --------------------------------------------------------------------------------------

    def _decide_link(self, name: str, *, included: bool) -> LeftOut | tarfile.TarInfo | None:
        """Decide about a link by its name and its target. Raises CodeError if it is outside."""
        components, path = name.split("/"), os.path.join(self._root, name)
        try:
            link = os.readlink(path)
        except OSError:
            return None
        target = os.path.realpath(path)
        for folder in (target, *map(str, Path(target).parents)):
            if self._folders.is_drumline_home(folder):
                return LeftOut(name, f"link to {DRUMLINE_HOME}")
        if self._folders.is_own_checkpoint(target):
            return LeftOut(name, OWN_CHECKPOINT)
        reason = self._target_reason(target) or secret_file(components) or secret_folder(components)
        if reason is not None and not included:
            return LeftOut(name, reason)
        entry = tarfile.TarInfo(name)
        entry.type = tarfile.SYMTYPE
        entry.linkname = self._relative_target(name, link)
        return entry

    def _target_reason(self, target: str) -> str | None:
        """Return the reason why the target of a link is not sent, or None."""
        if target == self._root or os.path.islink(target):  # islink: a loop of links
            return None
        if not target.startswith(self._root + os.sep):
            return _outside_reason(target)
        name = os.path.relpath(target, self._root)
        if os.path.isdir(target):
            folder_verdict = self._folders.verdict(name)
            return folder_verdict.left_out.reason if folder_verdict else None
        verdict = self._decide(name, None, self._max_bytes)
        return verdict.reason if isinstance(verdict, LeftOut) else None

    def _relative_target(self, name: str, link: str) -> str:
        """Return the target relative to the link. Raises CodeError if it is outside the folder."""
        root = self._root
        link_folder = os.path.dirname(os.path.join(root, name))
        target = os.path.normpath(os.path.join(link_folder, link))
        if os.path.isabs(link):
            parent = os.path.realpath(os.path.dirname(target))
            target = os.path.join(parent, os.path.basename(target))
        if target != root and not target.startswith(root + os.sep):
            raise CodeError(
                f"code: the link {printable(name)} points out of the folder, to "
                f"{printable(link)}; replace it by what it points to, or add it to .drumlineignore"
            )
        return os.path.relpath(target, link_folder)

    # The list of files --------------------------------------------------------------------------

    def _skip(self, folder: str) -> bool:
        """Return True if a folder is left out, and record it, before its files are listed."""
        verdict = self._folders.verdict(folder)
        left_out = verdict.left_out if verdict else None
        if left_out is None and not os.access(os.path.join(self._root, folder), os.R_OK | os.X_OK):
            left_out = LeftOut(f"{folder}/", UNREADABLE)
        if left_out is None:
            return False
        self._left_out.setdefault(left_out.path, left_out)
        return True

    def _add_included(self, names: list[str]) -> list[str]:
        """Add the files under `include`, even if a .gitignore excludes them."""
        selected = set(names)
        for name in self._rules.include:
            components, path = name.split("/"), os.path.join(self._root, name)
            if name.startswith("/") or ".." in components:
                raise CodeError(f"include: {printable(name)} is not in {self._folder}")
            if not os.path.lexists(path) and not _matches(name, names):
                raise CodeError(
                    f"include: {printable(name)} matches nothing in {self._folder}; "
                    "correct it or leave it out"
                )
            if not os.path.lexists(path) or os.path.isdir(path):
                continue
            if _NEVER_INCLUDED & set(components):
                raise CodeError(f"include: {printable(name)} is not a file that can be sent")
            verdict = self._folders.verdict("/".join(components[:-1]))
            if verdict is not None and not verdict.overridable:
                raise CodeError(
                    f"include: {printable(name)} cannot be sent, because it is in "
                    f"{printable(verdict.left_out.path)} ({verdict.left_out.reason})"
                )
            selected.add(name)
        return sorted(selected)

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of the files that are not left out because of their names."""
        sizes: dict[str, int] = {}
        for name in self._names:
            components = name.split("/")
            if name not in self._rules.include and (
                self._folders.verdict("/".join(components[:-1])) or secret_file(components)
            ):
                continue
            try:
                status = os.lstat(os.path.join(self._root, name))
            except OSError:
                continue
            private = not status.st_mode & 0o044 and not (
                self._patterns is not None and self._patterns.match_file(name)
            )
            if stat.S_ISREG(status.st_mode) and (name in self._rules.include or not private):
                sizes[name] = status.st_size
        return sizes

    def _require_size(self) -> None:
        """Raise CodeError if the files are too large, before any of them is read."""
        if (total := self._progress.total) > self._max_bytes:
            parts: dict[str, int] = {}
            for name, size in self.expected_sizes.items():
                part = name.partition("/")[0]
                parts[part] = parts.get(part, 0) + size
            largest = max(parts, key=lambda name: parts[name])
            raise CodeError(
                f"code: {self._folder} holds {format_size(total)}, more than "
                f"{format_size(self._max_bytes)}; the largest part is {printable(largest)} "
                f"with {format_size(parts[largest])}: add it to .drumlineignore, or keep data in a "
                "bucket"
            )


class _NotAFileError(Exception):
    """A pipe, a socket or a device, none of which can be sent."""


def format_size(size: int) -> str:
    """Format the size of code as `2 kB` or `3.4 MB`."""
    return f"{size / 1e6:,.1f} MB" if size >= 100_000 else f"{max(1, round(size / 1000))} kB"


def unmatched(folder: Path, include: tuple[str, ...]) -> list[str]:
    """Return the entries of `include` that match nothing in a folder."""
    root = Path(os.path.realpath(folder))
    missing = [name for name in include if not os.path.lexists(root / name)]
    names = list_files(root) if missing else []
    return [name for name in missing if not _matches(name, names)]


def _status(name: str, folder: int) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _patterns(include: tuple[str, ...]) -> "GitIgnoreSpec | None":
    if not include:
        return None
    from pathspec import GitIgnoreSpec

    return GitIgnoreSpec.from_lines(include)


def _matches(pattern: str, names: list[str]) -> bool:
    spec = _patterns((pattern,))
    return spec is not None and any(spec.match_file(name) for name in names)


def _outside_reason(target: str) -> str | None:
    """Return the reason why a file outside the folder is secret, or None."""
    components = target.strip("/").split("/")
    for depth in range(1, len(components) + 1):
        if reason := secret_folder(components[:depth]):
            return reason
    if not os.path.isfile(target):
        return None
    scan = SecretScan(components)
    try:
        with closing(os.fdopen(os.open(target, _FILE), "rb")) as file:
            scan.feed(file.read(_TARGET_BYTES))
    except OSError:
        return UNREADABLE
    return scan.reason() or secret_file(components)
