"""The content of a home folder for its removal, and the slices of Google Cloud that it knows.

These functions need no server.
"""

import fcntl
import shutil
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from drumline.chips import LOCAL_ZONES
from drumline.errors import UserError
from drumline.jobs.billing import price_per_hour

BUCKETS = "emulator/buckets"
_KINDS = {
    "jobs": ("jobs.db*", "owners.json"),
    "logs": ("logs", "server.log*"),
    "outputs": ("outputs",),
    "archives": ("code",),
    "buckets": (BUCKETS,),
    "emulator": ("emulator",),
    "settings": ("config.yaml*", "ssh", "known_hosts", "secrets", "server.lock", "server.sock"),
}
"""The files of a home by kind, as patterns. A file belongs to the first kind that names it."""
_IN_LOCAL_ZONE = f"zone IN ({', '.join(repr(zone) for zone in LOCAL_ZONES)})"


@dataclass(frozen=True)
class CloudSlice:
    """A slice of Google Cloud that was requested and may still exist."""

    name: str
    job: str
    accelerator: str
    zone: str
    rate: float | None
    """Dollars per hour, if the price is known."""


@dataclass(frozen=True)
class HomePart:
    """The files of one kind in a home."""

    kind: str
    paths: tuple[Path, ...]
    bytes: int


def cloud_slices(home: Path) -> list[CloudSlice]:
    """Return the slices of Google Cloud that the jobs of a home have requested."""
    if not _may_use_google(home):
        return []
    rows = _query(
        home,
        "SELECT slices.name, job, accelerator, zone,"  # noqa: S608 - has no text of the user
        " CASE WHEN json_valid(spec) THEN spec ->> '$.capacity' END"
        " FROM slices LEFT JOIN jobs ON number = CAST(job AS INTEGER)"
        f" WHERE gone IS NULL AND NOT {_IN_LOCAL_ZONE} ORDER BY asked",
    )
    return [
        CloudSlice(name, job, accelerator, zone, price_per_hour(accelerator, zone, capacity or ""))
        for name, job, accelerator, zone, capacity in rows
    ]


def job_count(home: Path) -> int:
    """Return the number of jobs of a home."""
    return sum(int(count) for (count,) in _query(home, "SELECT count(*) FROM jobs"))


def outside_checkpoints(home: Path) -> list[str]:
    """Return the checkpoint folders that jobs have set outside the home and its buckets."""
    uses_google = _may_use_google(home)
    rows = _query(
        home,
        "SELECT DISTINCT spec ->> '$.checkpoint',"  # noqa: S608 - has no text of the user
        " EXISTS (SELECT 1 FROM slices WHERE CAST(job AS INTEGER) = number"
        f" AND NOT {_IN_LOCAL_ZONE})"
        " FROM jobs WHERE json_valid(spec) AND spec ->> '$.checkpoint' IS NOT NULL",
    )
    return sorted(
        {
            folder
            for folder, ran_on_google in rows
            if not Path(folder).is_relative_to(home)
            and ((uses_google and ran_on_google) or not folder.startswith("gs://"))
        }
    )


def _may_use_google(home: Path) -> bool:
    """Return True if a server of this home used Google, or an older release recorded no cloud."""
    rows = _query(home, "SELECT value FROM meta WHERE key = 'clouds'")
    return not rows or "google" in rows[0][0].split()


def _query(home: Path, query: str) -> list[tuple[str, ...]]:
    """Return the rows of a query, none without a database. Raise UserError if it is unreadable."""
    path = home / "jobs.db"
    if not path.exists():
        return []
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True)) as db:
            return db.execute(query).fetchall()
    except sqlite3.Error as error:
        raise UserError(
            f"{path} cannot be read ({error}), so nobody knows which slices its jobs hold; look at"
            " the TPUs in the console of your project, then delete the folder yourself"
        ) from None


def home_parts(home: Path) -> tuple[list[HomePart], list[Path]]:
    """Return the files of a home by kind, and those that Drumline does not know."""
    known: dict[Path, str] = {}
    for kind, patterns in _KINDS.items():
        for pattern in patterns:
            for path in home.glob(pattern):
                known.setdefault(path, kind)
    sizes = dict.fromkeys(known, 0)
    for path in sizes:
        sizes[path] = _size(path, leave_out=known.keys() - {path})
    parts = []
    for kind in _KINDS:
        paths = tuple(path for path in known if known[path] == kind)
        if paths:
            parts.append(HomePart(kind, paths, sum(sizes[path] for path in paths)))
    return parts, sorted(path for path in home.iterdir() if path not in known)


def _size(path: Path, leave_out: Iterable[Path]) -> int:
    """Return the bytes of a file or folder. Links are not followed."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(_size(child, leave_out) for child in path.iterdir() if child not in leave_out)


def delete_parts(home: Path, parts: Iterable[HomePart]) -> None:
    """Delete the files of a home, and the home if it is empty then."""
    for part in parts:
        for path in part.paths:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
    if not any(home.iterdir()):
        home.rmdir()


@contextmanager
def unused(home: Path) -> Iterator[None]:
    """Keep servers and emulators from starting in a home. Raise UserError if one runs."""
    running = []
    with ExitStack() as locks:
        for name, path in (("a server", "server.lock"), ("an emulator", "emulator/lock")):
            if not (home / path).exists():
                continue
            lock = locks.enter_context(open(home / path, "r+"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                running.append(name)
        if running:
            verb = "runs" if len(running) == 1 else "run"
            raise UserError(
                f"{' and '.join(running)} {verb} in {home}; nothing was deleted;"
                " first run drumline server stop --all"
            )
        yield
