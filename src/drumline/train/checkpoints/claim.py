"""One training for a checkpoint folder at a time.

A second one would take what the first is writing for the remains of a dead process, and clear it
away. So host 0 holds a lock on `drumline/lock` in the folder while it trains. The lock is the
kernel's: it ends with the process, however that ends, and nothing is left that could hinder the
next attempt. A bucket has no such locks, and neither have some file servers: there the user has to
see to it.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax

from drumline.train.agree import hosts_without
from drumline.train.checkpoints.files import disable_listing_cache, in_bucket, open_folder, usable
from drumline.train.checkpoints.marks import FOLDER
from drumline.train.mistakes import Mistake

PATIENCE = 10.0
"""Seconds for an earlier attempt of the same job to end. The job manager has given it up, so it is
either on its way out or cut off, and then a file server may not know for minutes."""

_held: set[int] = set()


def claim(folder: str, say: Callable[[str], None] = print) -> Callable[[], None]:
    """Hold the folder until the returned function is called; refused while another training does.

    All hosts call it, and all are refused together.
    """
    disable_listing_cache(folder)
    file, refusal = None, ""
    if jax.process_index() == 0:
        try:
            open_folder(folder)
            if not in_bucket(folder):
                with usable(folder):
                    file = _lock(folder, say)
        except Mistake as mistake:
            refusal = str(mistake)
    if hosts_without(not refusal):
        raise Mistake(refusal or f"checkpoint: host 0 cannot use {folder}")

    def release() -> None:
        if file is not None:
            _held.discard(file)
            os.close(file)

    return release


def _lock(folder: str, say: Callable[[str], None]) -> int | None:
    """The locked file; None where an earlier attempt of this job holds it and has been given up."""
    path = os.path.join(folder, FOLDER, "lock")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    until = time.monotonic() + PATIENCE
    while not _taken(file):
        holder = _read(file)
        if not _is_earlier_attempt(holder):
            os.close(file)
            raise Mistake(_refusal(folder, path, holder))
        if time.monotonic() > until:
            os.close(file)
            say(f"going on although {_told(holder)}, of an earlier attempt, still holds {folder}")
            return None
        time.sleep(0.05)
    _held.add(file)
    # It is there for the sentence that a second training gets, and no reason not to train.
    with suppress(OSError):
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(_ourselves()).encode(), 0)
    return file


def _taken(file: int) -> bool:
    """Whether the lock is ours now; also where the file system knows no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def _ourselves() -> dict[str, Any]:
    return {
        "process": os.getpid(),
        "machine": socket.gethostname(),
        "job": os.environ.get("DRUMLINE_JOB_ID"),
        "attempt": os.environ.get("DRUMLINE_ATTEMPT"),
    }


def _read(file: int) -> dict[str, Any]:
    """Who holds it; empty in the instant before that is written."""
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_earlier_attempt(holder: dict[str, Any]) -> bool:
    ours = _ourselves()
    same_job = ours["job"] is not None and holder.get("job") == ours["job"]
    return same_job and holder.get("attempt") != ours["attempt"]


def _refusal(folder: str, path: str, holder: dict[str, Any]) -> str:
    said = (
        f"checkpoint: {_told(holder)} is training into {folder}, and a second training would "
        "destroy its work; wait for it, stop it, or name another folder"
    )
    elsewhere = holder.get("machine") not in (None, socket.gethostname())
    # A file server may hold a dead machine's lock for good.
    return f"{said}; if that machine is gone, remove {path}" if elsewhere else said


def _told(holder: dict[str, Any]) -> str:
    if not holder:
        return "another process"
    return f"process {holder.get('process')} on {holder.get('machine')}"


def _let_go() -> None:
    """A child that was forked, a reader of data say, must not hold the folder after its parent."""
    while _held:
        os.close(_held.pop())


os.register_at_fork(after_in_child=_let_go)
