"""Buckets and objects of Cloud Storage, kept as folders and files.

A bucket is a subfolder, an object is a file below it, so emulated hosts that use the folder and
clients of the API see the same data. Nothing is stored beside the files: the generation of an
object is the modification time of its file in microseconds. Each write through this module makes it
greater. A file that a host wrote has a generation too.

An object whose name ends in `/` is a directory with the sticky bit. Directories without it only
exist because files are in them, and are no objects.

Content types, custom metadata and checksums are kept in memory and are lost at a restart.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from drumline.cloud.emulator.checksums import Checksums
from drumline.cloud.model.errors import Json

DRAFTS = ".drafts"
"""The subfolder for unfinished writes. It is no valid bucket name, so no listing shows it."""
MAX_NAME_BYTES = 1024
"""The limit of Cloud Storage for object names."""
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")


class StorageApiError(Exception):
    """A call that Cloud Storage answers with an error."""

    def __init__(self, status: int, reason: str, message: str, **details: str) -> None:
        """`details` go into the error's entry, such as its `location`."""
        super().__init__(message)
        self.status, self.reason, self.message, self.details = status, reason, message, details

    def as_json(self) -> Json:
        """The body of the answer."""
        entry = {"message": self.message, "domain": "global", "reason": self.reason}
        error: Json = {"code": self.status, "message": self.message}
        return {"error": error | {"errors": [entry | self.details]}}


def no_such_object(bucket: str, name: str) -> StorageApiError:
    """Return the error for an object that does not exist."""
    return StorageApiError(404, "notFound", f"No such object: {bucket}/{name}")


def invalid_argument(message: str) -> StorageApiError:
    """Return the error for a call that cannot succeed."""
    return StorageApiError(400, "invalid", message)


@dataclass(frozen=True)
class StoredObject:
    """An object as it was at one time."""

    bucket: str
    name: str
    path: Path
    size: int
    generation: int


@dataclass
class ObjectMetadata:
    """The part of an object's metadata that its file does not have."""

    generation: int
    fields: Json = field(default_factory=dict)
    """The fields that a client may set, such as `contentType` and `metadata`."""
    metageneration: int = 1
    checksums: Checksums | None = None


@dataclass(frozen=True)
class Preconditions:
    """The conditions under which a call takes effect. None means no condition.

    An object that does not exist has generation 0.
    """

    generation_match: int | None = None
    generation_not_match: int | None = None
    metageneration_match: int | None = None
    metageneration_not_match: int | None = None

    def check(self, generation: int, metageneration: int, *, reads: bool = False) -> None:
        """Raise 412, or 304 for a read whose `NotMatch` condition fails."""
        if self.generation_match not in (None, generation):
            raise _condition_not_met("ifGenerationMatch")
        if self.metageneration_match not in (None, metageneration):
            raise _condition_not_met("ifMetagenerationMatch")
        status = 304 if reads else 412
        if self.generation_not_match == generation:
            raise _condition_not_met("ifGenerationNotMatch", status)
        if generation and self.metageneration_not_match == metageneration:
            raise _condition_not_met("ifMetagenerationNotMatch", status)


def _condition_not_met(parameter: str, status: int = 412) -> StorageApiError:
    message = "At least one of the pre-conditions you specified did not hold."
    location = {"locationType": "parameter", "location": parameter}
    return StorageApiError(status, "conditionNotMet", message, **location)


class BucketFolder:
    """A folder with buckets.

    One process at a time serves a folder, and one thread calls `commit` and `delete`, so no other
    write comes between the check of a precondition and the write.
    """

    def __init__(self, folder: Path, clock: Callable[[], int] = time.time_ns) -> None:
        """Create the folder. Unfinished writes of a previous process are removed."""
        self._folder = folder.resolve()
        self._clock = clock
        self._deleted: dict[tuple[str, str], int] = {}
        """The last generations of deleted objects. The next object of the name must be newer."""
        self._metadata: dict[tuple[str, str], ObjectMetadata] = {}
        self._drafts = self._folder / DRAFTS
        shutil.rmtree(self._drafts, ignore_errors=True)
        self._folder.mkdir(parents=True, exist_ok=True)

    # Buckets

    def buckets(self) -> list[str]:
        """Return the names of all buckets, in order."""
        return sorted(
            entry.name
            for entry in os.scandir(self._folder)
            if _BUCKET_NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )

    def create_bucket(self, bucket: str) -> None:
        """Create a bucket."""
        if not _BUCKET_NAME.fullmatch(bucket):
            raise invalid_argument(f"Invalid bucket name: '{bucket}'")
        try:
            (self._folder / bucket).mkdir()
        except FileExistsError:
            message = (
                "Your previous request to create the named bucket succeeded and you already own it."
            )
            raise StorageApiError(409, "conflict", message) from None

    def delete_bucket(self, bucket: str) -> None:
        """Delete an empty bucket."""
        folder = self.bucket_folder(bucket)
        if next(self.objects(bucket), None) is not None:
            message = "The bucket you tried to delete is not empty."
            raise StorageApiError(409, "conflict", message)
        shutil.rmtree(folder)

    def bucket_folder(self, bucket: str) -> Path:
        """Return the folder of a bucket that exists."""
        folder = self._folder / bucket
        if not _BUCKET_NAME.fullmatch(bucket) or folder.is_symlink() or not folder.is_dir():
            raise StorageApiError(404, "notFound", "The specified bucket does not exist.")
        return folder

    # Objects

    def find(self, bucket: str, name: str) -> StoredObject | None:
        """Return an object, or None if there is no such object."""
        root = self.bucket_folder(bucket)
        if _name_problem(name):
            return None
        path = root / name
        try:
            status = path.lstat()
        except (OSError, ValueError):
            return None
        expected = _is_placeholder if name.endswith("/") else stat.S_ISREG
        if not expected(status.st_mode) or _leads_through_link(root, path):
            return None
        return _stored(bucket, name, path, status)

    def get(self, bucket: str, name: str) -> StoredObject:
        """Return an object that exists."""
        stored = self.find(bucket, name)
        if stored is None:
            raise no_such_object(bucket, name)
        return stored

    def metadata(self, stored: StoredObject) -> ObjectMetadata:
        """Return the metadata of an object, which may be changed in place."""
        key = (stored.bucket, stored.name)
        metadata = self._metadata.get(key)
        if metadata is None or metadata.generation != stored.generation:
            metadata = self._metadata[key] = ObjectMetadata(stored.generation)
        return metadata

    def check(
        self, stored: StoredObject | None, conditions: Preconditions, *, reads: bool = False
    ) -> None:
        """Check preconditions against an object, or against its absence."""
        if stored is None:
            conditions.check(0, 0, reads=reads)
        else:
            metageneration = self.metadata(stored).metageneration
            conditions.check(stored.generation, metageneration, reads=reads)

    def new_draft(self) -> Path:
        """Return the path of a new file for the content of an object."""
        self._drafts.mkdir(mode=0o700, exist_ok=True)
        return self._drafts / secrets.token_hex(16)

    def commit(
        self,
        bucket: str,
        name: str,
        draft: Path,
        conditions: Preconditions,
        fields: Json,
        checksums: Checksums,
    ) -> StoredObject:
        """Make a draft the newest generation of an object, or raise and leave the draft alone."""
        root = self.bucket_folder(bucket)
        if problem := _name_problem(name):
            raise invalid_argument(problem)
        current = self.find(bucket, name)
        self.check(current, conditions)
        path = root / name
        if _leads_through_link(root, path):
            raise invalid_argument(f"'{bucket}/{name}' leads through a symbolic link")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            last = current.generation if current else self._deleted.get((bucket, name), 0)
            generation = max(self._clock() // 1000, last + 1)
            if name.endswith("/"):
                if draft.stat().st_size:
                    message = f"The object '{name}' must be empty because its name ends in '/'"
                    raise invalid_argument(message)
                path.mkdir(exist_ok=True)
                path.chmod(path.stat().st_mode | stat.S_ISVTX)
                draft.unlink()
            else:
                if path.is_dir() and not _is_placeholder(path.stat().st_mode):
                    _remove_empty_directories(path)
                os.utime(draft, ns=(generation * 1000, generation * 1000))
                draft.replace(path)
        except (NotADirectoryError, FileExistsError, IsADirectoryError) as error:
            raise invalid_argument(
                f"'{bucket}/{name}' conflicts with another object: in this emulator a name cannot "
                "be an object and a prefix of other objects, because objects are files"
            ) from error
        except OSError as error:
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise invalid_argument(f"'{bucket}/{name}': {error.strerror}") from error
        if name.endswith("/"):
            os.utime(path, ns=(generation * 1000, generation * 1000))
        self._deleted.pop((bucket, name), None)
        stored = _stored(bucket, name, path, path.stat())
        self._metadata[bucket, name] = ObjectMetadata(
            stored.generation, fields, checksums=checksums
        )
        return stored

    def delete(self, bucket: str, name: str, conditions: Preconditions) -> None:
        """Delete an object, and the directories that only existed because of it."""
        stored = self.get(bucket, name)
        self.check(stored, conditions)
        self._deleted[bucket, name] = stored.generation
        if name.endswith("/"):
            stored.path.chmod(stored.path.stat().st_mode & ~stat.S_ISVTX)
            parent = stored.path
        else:
            stored.path.unlink(missing_ok=True)
            parent = stored.path.parent
        self._metadata.pop((bucket, name), None)
        root = self._folder / bucket
        with contextlib.suppress(OSError):  # A directory that is not empty stays.
            while parent != root and not _is_placeholder(parent.stat().st_mode):
                parent.rmdir()
                parent = parent.parent

    def objects(self, bucket: str, prefix: str = "", start: str = "") -> "ObjectWalk":
        """Return the objects whose names begin with `prefix` and are not below `start`."""
        return ObjectWalk(bucket, self.bucket_folder(bucket), prefix, start)


class ObjectWalk(Iterator[StoredObject]):
    """The objects of a bucket in the order of their names, read directory by directory.

    `skip_to` may be called between two objects, so a listing with a delimiter does not visit what
    is below a common prefix.
    """

    def __init__(self, bucket: str, root: Path, prefix: str, start: str) -> None:
        """Reading starts with the request for the first object."""
        self._bucket, self._prefix, self._start = bucket, prefix, start
        directory = prefix.rpartition("/")[0]
        below = root / directory
        possible = not directory.endswith("/") and not (directory and _name_problem(directory))
        readable = possible and not _leads_through_link(root, below / "x")
        top = f"{directory}/" if directory else ""
        self._walk = self._below(below, top) if readable else iter(())

    def skip_to(self, start: str) -> None:
        """Continue with the first name that is not below `start`."""
        self._start = max(self._start, start)

    def __next__(self) -> StoredObject:
        """Return the next object."""
        return next(self._walk)

    def _below(self, directory: Path, prefix: str) -> Iterator[StoredObject]:
        try:
            if prefix and self._wants(prefix):
                status = directory.lstat()
                if _is_placeholder(status.st_mode):
                    yield _stored(self._bucket, prefix, directory, status)
            entries = sorted(
                (f"{prefix}{entry.name}/" if is_folder else f"{prefix}{entry.name}", entry)
                for entry in os.scandir(directory)
                if (is_folder := entry.is_dir(follow_symlinks=False))
                or entry.is_file(follow_symlinks=False)
            )
        except OSError:  # Deleted since its parent was read.
            return
        for name, entry in entries:
            if name.endswith("/"):
                related = name.startswith(self._prefix) or self._prefix.startswith(name)
                if related and (name > self._start or self._start.startswith(name)):
                    yield from self._below(Path(entry.path), name)
            elif self._wants(name) and _is_unicode(name):
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    yield _stored(self._bucket, name, Path(entry.path), status)

    def _wants(self, name: str) -> bool:
        return name.startswith(self._prefix) and name >= self._start


def _stored(bucket: str, name: str, path: Path, status: os.stat_result) -> StoredObject:
    size = 0 if stat.S_ISDIR(status.st_mode) else status.st_size
    return StoredObject(bucket, name, path, size, status.st_mtime_ns // 1000)


def _name_problem(name: str) -> str:
    """Return the reason why no object can have this name; empty if one can."""
    if not name or not _is_unicode(name) or "\r" in name or "\n" in name or "\0" in name:
        return f"Invalid object name: {name!r}"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"The object name must be at most {MAX_NAME_BYTES} bytes long"
    segments = name.removesuffix("/").split("/")
    if any(segment in ("", ".", "..") for segment in segments):
        return (
            f"Invalid object name: {name!r}: in this emulator objects are files, so no part "
            "between slashes can be empty, '.' or '..'"
        )
    if any(len(segment.encode()) > 255 for segment in segments):
        return "In this emulator a part of an object name between slashes has at most 255 bytes"
    return ""


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_placeholder(mode: int) -> bool:
    return stat.S_ISDIR(mode) and bool(mode & stat.S_ISVTX)


def _leads_through_link(root: Path, path: Path) -> bool:
    """Return True if a directory between the bucket and the file is a symbolic link."""
    return os.path.realpath(path.parent) != str(path.parent) or root not in path.parents


def _remove_empty_directories(directory: Path) -> None:
    """Remove a tree of directories if there is no file in it."""
    for folder, _, files in os.walk(directory, topdown=False):
        if files or _is_placeholder(os.stat(folder).st_mode):
            return
        with contextlib.suppress(OSError):
            os.rmdir(folder)


def listing_start_after(prefix: str) -> str:
    """Return the least name after all names that begin with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)
