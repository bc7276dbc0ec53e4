"""Claim a checkpoint folder for this program, on a disk or in a bucket.

Two programs that write to one folder would destroy each other's checkpoints. fence.py has the
rules by which one of them stops. On a disk host 0 also holds a lock of the kernel while it trains,
so that a second program started by hand is refused at once instead of taking the folder over. The
lock ends with the process and hinders no later attempt. Buckets, and some file servers, have no
such locks.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from etils import epath  # type: ignore[import-untyped]

from drumline.errors import UserError
from drumline.train.checkpoints.fence import ClaimRecords, Fence, Writer, claim_folder, newest
from drumline.train.checkpoints.files import (
    BUCKET,
    COMMITTED,
    disable_listing_cache,
    in_bucket,
    open_folder,
    raise_user_errors,
)
from drumline.train.checkpoints.marks import FOLDER
from drumline.train.multihost import failed_hosts

LOCK_TIMEOUT = 10.0
"""Seconds to wait for the lock of an earlier attempt. The job manager has given that attempt up, so
it either ends soon or is cut off, and then a file server may keep the lock for minutes."""

_locked: set[int] = set()
"""The open files of the locks that this process holds."""


@dataclass(frozen=True)
class FolderClaim:
    """The claim of this program on a folder. Only host 0 has the fence, and on a disk the lock."""

    fence: Fence | None = None
    lock: int | None = None

    def check(self) -> None:
        """Raise FencedOff if another program has taken over the folder. Host 0 alone knows."""
        if self.fence is not None:
            self.fence.check()

    def release(self) -> None:
        """Let other programs claim the folder."""
        if self.fence is not None:
            # The run is over, and its result must be reported whatever becomes of the release.
            with suppress(OSError):
                self.fence.release()
        if self.lock is not None:
            _unlock(self.lock)


def claim(folder: str, log: Callable[[str], None] = print) -> FolderClaim:
    """Claim the folder. All hosts call this, and if it is refused all raise UserError."""
    disable_listing_cache(folder)
    folder_claim, refusal = FolderClaim(), ""
    if jax.process_index() == 0:
        try:
            open_folder(folder)
            with raise_user_errors(folder):
                folder_claim = _claim(folder, log)
        except UserError as error:
            refusal = str(error)
    if failed_hosts(not refusal):
        folder_claim.release()
        raise UserError(refusal or f"checkpoint: host 0 cannot use {folder}")
    return folder_claim


def is_fenced(folder: str) -> bool:
    """Return True if an attempt of the job manager has this folder with its fencing number.

    After its claim, the next attempt can start although this one may still run.
    """
    writer = this_writer(folder)
    return writer.assigned and writer.fence > 0


def this_writer(folder: str) -> Writer:
    """Describe this program, from the environment that the agent of the job manager has set."""
    number = os.environ.get("DRUMLINE_FENCE", "")
    assigned = os.environ.get("DRUMLINE_CHECKPOINT", "")
    return Writer(
        id=secrets.token_hex(8),
        owner=os.environ.get("DRUMLINE_OWNER", ""),
        job=os.environ.get("DRUMLINE_JOB_ID", ""),
        attempt=int(os.environ.get("DRUMLINE_ATTEMPT") or 0),
        fence=int(number) if number.isdigit() else 0,
        assigned=bool(assigned) and f"{_path(folder)}/".startswith(f"{_path(assigned)}/"),
        machine=socket.gethostname(),
        process=os.getpid(),
    )


def _path(folder: str) -> str:
    """Return the one spelling of a folder, so that no other spelling has claims of its own.

    In a bucket it is the spelling of epath, with which the checkpoints are written.
    """
    return str(epath.Path(folder)) if in_bucket(folder) else os.path.realpath(folder)


def _claim(folder: str, log: Callable[[str], None]) -> FolderClaim:
    writer, records = this_writer(folder), claim_records(folder)
    lock = None if in_bucket(folder) else _lock(folder, writer, records, log)
    proves_end = lock is not None and _has_locks(lock)
    try:
        holder = newest(records)
        # A lock that is free on the holder's own machine proves that its process has ended.
        on_this_machine = holder is not None and holder.writer.machine == writer.machine
        fence = claim_folder(
            folder,
            records,
            writer,
            is_complete=lambda name: bool((epath.Path(folder) / name / COMMITTED).exists()),
            is_over=proves_end and on_this_machine,
        )
    except BaseException:
        if lock is not None:
            _unlock(lock)
        raise
    return FolderClaim(fence, lock)


def claim_records(folder: str) -> ClaimRecords:
    """Return the claims of a folder, on a disk or in a bucket."""
    return BucketRecords(folder) if in_bucket(folder) else DiskRecords(folder)


# Records ------------------------------------------------------------------------------------------


class DiskRecords:
    """The claims of a folder on a disk: one file each, created by a hard link."""

    def __init__(self, folder: str) -> None:
        """Nothing is written yet."""
        self._folder = Path(folder) / FOLDER / "claims"

    def numbers(self) -> list[int]:
        """Return the numbers of all records."""
        if not self._folder.is_dir():
            return []
        stems = (path.stem for path in self._folder.iterdir() if path.suffix == ".json")
        return [int(stem) for stem in stems if stem.isdigit()]

    def read(self, number: int) -> dict[str, Any] | None:
        """Return the record with this number, or None."""
        try:
            return _record(self._path(number).read_bytes())
        except FileNotFoundError:
            return None

    def create(self, number: int, record: dict[str, Any]) -> bool:
        """Store a record unless one of that number exists. Return False if one does."""
        self._folder.mkdir(parents=True, exist_ok=True)
        data, path = json.dumps(record).encode(), self._path(number)
        draft = path.with_name(f"{number}.{record['writer']['id']}.draft")
        try:
            with draft.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(draft, path)
        except FileExistsError:
            # Over NFS the answer to a link that was made may be lost, and the call repeated.
            return bool(self.read(number) == json.loads(data))
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return _create_without_link(path, data)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def remove(self, number: int) -> None:
        """Remove a record; no error if there is none."""
        self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.json"


_NO_HARD_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def _create_without_link(path: Path, data: bytes) -> bool:
    """Create a file on a file system without hard links, such as a mounted bucket."""
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno == errno.ENOSPC:
            path.unlink(missing_ok=True)
        # gcsfuse creates the object when the file is closed, and finds out then.
        if error.errno != errno.ESTALE:
            raise
        return False
    return True


class BucketRecords:
    """The claims of a folder in Cloud Storage: one object each, created only if it is not there."""

    def __init__(self, folder: str) -> None:
        """Nothing is written yet."""
        try:
            from google.cloud import storage  # type: ignore[attr-defined]
        except ImportError:
            raise UserError(
                f"checkpoint: {folder} needs google-cloud-storage: pip install 'drumline[gcs]'"
            ) from None
        name, _, path = _path(folder).removeprefix(BUCKET).partition("/")
        with _as_os_error():
            # Access to objects needs no project, and a host may not know one.
            self._bucket = storage.Client(project=None).bucket(name)
        self._prefix = f"{path}/{FOLDER}/claims/".lstrip("/")

    def numbers(self) -> list[int]:
        """Return the numbers of all records."""
        client = self._bucket.client
        with _as_os_error():
            blobs = list(client.list_blobs(self._bucket, prefix=self._prefix, delimiter="/"))
        stems = (blob.name.removeprefix(self._prefix).removesuffix(".json") for blob in blobs)
        return [int(stem) for stem in stems if stem.isdigit()]

    def read(self, number: int) -> dict[str, Any] | None:
        """Return the record with this number, or None."""
        from google.api_core.exceptions import NotFound

        with _as_os_error():
            try:
                return _record(self._blob(number).download_as_bytes())
            except NotFound:
                return None

    def create(self, number: int, record: dict[str, Any]) -> bool:
        """Store a record unless one of that number exists. Return False if one does."""
        from google.api_core.exceptions import PreconditionFailed

        data = json.dumps(record)
        with _as_os_error():
            try:
                # Generation 0: the object must not exist. With a precondition the client may
                # repeat a call that was not answered.
                self._blob(number).upload_from_string(
                    data, content_type="application/json", if_generation_match=0
                )
            except PreconditionFailed:
                # Perhaps by the first of two calls, whose answer was lost.
                return bool(self.read(number) == json.loads(data))
        return True

    def remove(self, number: int) -> None:
        """Remove a record; no error if there is none."""
        from google.api_core.exceptions import NotFound

        with _as_os_error(), suppress(NotFound):
            self._blob(number).delete()

    def _blob(self, number: int) -> Any:
        return self._bucket.blob(f"{self._prefix}{number}.json")


@contextmanager
def _as_os_error() -> Iterator[None]:
    """Raise what the client reports as an OSError, with Google's own words."""
    from google.api_core.exceptions import GoogleAPIError
    from google.auth.exceptions import GoogleAuthError
    from requests import RequestException

    try:
        yield
    except (GoogleAPIError, GoogleAuthError, RequestException) as error:
        raise OSError(str(error)) from error


def _record(data: bytes) -> dict[str, Any]:
    try:
        record = json.loads(data)
        writer = record["writer"]
    except (ValueError, KeyError, TypeError):
        raise OSError("a claim in it cannot be read; is the disk damaged?") from None
    if not isinstance(writer, dict):
        raise OSError("a claim in it cannot be read; is the disk damaged?")
    return dict(record)


# The lock -----------------------------------------------------------------------------------------


def _lock(
    folder: str, writer: Writer, records: ClaimRecords, log: Callable[[str], None]
) -> int | None:
    """Lock the folder. Return the open file; None if an earlier attempt of this job keeps the lock.

    Raises UserError while another program holds it.
    """
    path = os.path.join(folder, FOLDER, "lock")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + LOCK_TIMEOUT
    while not _try_lock(file):
        lock_holder = _read_lock(file)
        if not _is_earlier_attempt(lock_holder, writer, records):
            os.close(file)
            raise UserError(_locked_by(folder, path, lock_holder))
        if time.monotonic() > deadline:
            os.close(file)
            name = _process_name(lock_holder)
            log(f"taking over {folder} from {name}, an earlier attempt that still holds its lock")
            return None
        time.sleep(0.05)
    _locked.add(file)
    # The text is for the message that a second program gets, and no reason not to train.
    with suppress(OSError):
        os.ftruncate(file, 0)
        text = {"process": writer.process, "machine": writer.machine, "job": writer.job or None}
        os.pwrite(file, json.dumps({**text, "attempt": str(writer.attempt)}).encode(), 0)
    return file


def _has_locks(file: int) -> bool:
    """Return False if the file system has no locks, so that a free lock proves nothing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _try_lock(file: int) -> bool:
    """Return True if this process has the lock now, or if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def _read_lock(file: int) -> dict[str, Any]:
    """Read who holds the lock; empty in the instant before that is written."""
    try:
        holder = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def _is_earlier_attempt(lock_holder: dict[str, Any], writer: Writer, records: ClaimRecords) -> bool:
    """Return True if the lock's holder is an attempt that this one follows."""
    if not writer.owner:
        return False
    claim = newest(records)
    if claim is not None:
        same_owner = claim.writer.owner == writer.owner and claim.writer.fence < writer.fence
        return same_owner and (writer.assigned or claim.writer.job == writer.job)
    # A folder of version 0.1: its programs locked it, and did not claim it.
    same_job = lock_holder.get("job") == writer.job
    return same_job and lock_holder.get("attempt") != str(writer.attempt)


def _locked_by(folder: str, path: str, lock_holder: dict[str, Any]) -> str:
    message = (
        f"checkpoint: {_process_name(lock_holder)} is training into {folder}, and a second training"
        " would destroy its work; wait for it, stop it, or name another folder"
    )
    elsewhere = lock_holder.get("machine") not in (None, socket.gethostname())
    # A file server may keep the lock of a machine that is gone for ever.
    return f"{message}; if that machine is gone, remove {path}" if elsewhere else message


def _process_name(lock_holder: dict[str, Any]) -> str:
    if not lock_holder:
        return "another process"
    return f"process {lock_holder.get('process')} on {lock_holder.get('machine')}"


def _unlock(file: int) -> None:
    _locked.discard(file)
    os.close(file)


def _unlock_all() -> None:
    """A forked child, such as a data reader, must not hold the locks of its parent."""
    while _locked:
        os.close(_locked.pop())


os.register_at_fork(after_in_child=_unlock_all)
