"""The fence of a checkpoint folder: one writer at a time, even when an old one wakes up late.

A folder's claims are a chain of small records, `drumline/claims/1.json`, `2.json`, and so on. The
newest record is in force. A record is only ever created, never changed, and only if its number is
free; of two writers that create the same number one fails. So a writer that adds a record knows
that nobody has claimed the folder since its last one, and a writer that was paused learns it at
once.

A writer adds a record when it claims the folder, before and after each checkpoint that it writes,
before anything is removed, and when it is done. The record has the names of the checkpoints that
are being written and removed. The next writer never uses these names, so an old writer that wakes
up late cannot touch anything that the new one reads or writes.

Standard library only. claim.py has the records on a disk and in a bucket.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, Self

from drumline.errors import CheckpointError, UserError

TRIES = 100
"""The number of times that a claim is tried again because another writer added a record first."""


class FencedOff(CheckpointError):
    """Another writer has claimed the folder. This one must stop, and has changed nothing since."""


@dataclass(frozen=True)
class Writer:
    """A program that writes checkpoints: an attempt of a job, or one started by hand."""

    id: str
    """A random name of this process."""
    owner: str = ""
    """The id of the job database that started it; empty for a program started by hand."""
    job: str = ""
    attempt: int = 0
    fence: int = 0
    """The fencing number: it grows with every attempt that the owner starts, of any job."""
    assigned: bool = False
    """True if the owner has given the folder to this attempt, and to no other at the same time."""
    machine: str = ""
    process: int = 0

    def __str__(self) -> str:
        """Name it for a message."""
        process = f"process {self.process} on {self.machine or 'an unknown machine'}"
        if not self.owner:
            return process
        return f"attempt {self.attempt} of job {self.job} (home {self.owner}, {process})"


@dataclass(frozen=True)
class Claim:
    """One record of the chain."""

    number: int
    """The place in the chain."""
    since: int
    """The number of the record with which this writer claimed the folder."""
    writer: Writer
    released: bool = False
    """True if the writer is done."""
    writing: str = ""
    """The name of the checkpoint that is being written."""
    removing: tuple[str, ...] = ()
    """The names of checkpoints that are being removed."""
    abandoned: tuple[str, ...] = ()
    """Names that an earlier writer may still write to or remove; they are never used again."""

    def as_json(self) -> dict[str, Any]:
        """The record as it is stored."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Read a stored record. Keys of a newer version are ignored."""
        writer = _known_fields(Writer, value["writer"])
        known = _known_fields(cls, value)
        names = {key: tuple(known.get(key, ())) for key in ("removing", "abandoned")}
        return cls(**{**known, **names, "writer": Writer(**writer)})


def _known_fields(kind: type, value: dict[str, Any]) -> dict[str, Any]:
    return {key: item for key, item in value.items() if key in kind.__dataclass_fields__}  # type: ignore[attr-defined]


class ClaimRecords(Protocol):
    """The storage of the chain of a folder."""

    def numbers(self) -> list[int]:
        """Return the numbers of all records."""
        ...

    def read(self, number: int) -> dict[str, Any] | None:
        """Return the record with this number, or None."""
        ...

    def create(self, number: int, record: dict[str, Any]) -> bool:
        """Store a record unless one of that number exists. Return False if one does."""
        ...

    def remove(self, number: int) -> None:
        """Remove a record; no error if there is none."""
        ...


def newest(records: ClaimRecords) -> Claim | None:
    """Return the claim in force; None if the folder was never claimed."""
    for _ in range(TRIES):
        numbers = records.numbers()
        if not numbers:
            return None
        record = records.read(max(numbers))
        # Its writer may have added the next one and removed this one in between.
        if record is not None:
            return Claim.from_json(record)
    raise OSError("the claims of the folder change faster than they can be read")


def refusal(holder: Claim | None, writer: Writer, *, is_over: bool = False) -> str:
    """Return why a writer may not claim a folder; empty if it may.

    `is_over` says that the holder's process is known to have ended.
    """
    if holder is None:
        return ""
    other = holder.writer
    if writer.owner and other.owner:
        if writer.owner != other.owner:
            return f"it holds the checkpoints of job {other.job} of another home ({other})"
        if writer.fence < other.fence:
            return f"a later attempt has claimed it ({other})"
        if writer.assigned or writer.job == other.job:
            return ""
    if other.owner and not holder.released and not is_over:
        return f"it is claimed by {other}"
    return ""


class Fence:
    """The claim of one writer on a folder. Each method raises FencedOff if it was lost."""

    def __init__(self, folder: str, records: ClaimRecords, claim: Claim) -> None:
        """Hold a claim that was added to the records."""
        self._folder, self._records, self._claim = folder, records, claim
        self._lock = threading.Lock()

    @property
    def number(self) -> int:
        """The number of the record with which the folder was claimed."""
        return self._claim.since

    @property
    def abandoned(self) -> tuple[str, ...]:
        """Names that must not be used, because an earlier writer may still write to them."""
        return self._claim.abandoned

    def begin_write(self, name: str, removing: Iterable[str] = ()) -> None:
        """Announce that a checkpoint will be written, and which ones are removed before."""
        self._add(writing=name, removing=tuple(removing))

    def begin_removal(self, names: Iterable[str]) -> None:
        """Announce that nothing is being written any more, and that these will be removed."""
        self._add(writing="", removing=tuple(names))

    def check(self) -> None:
        """Raise FencedOff if another writer has claimed the folder."""
        holder = newest(self._records)
        if holder is None or holder.writer.id != self._claim.writer.id:
            raise self._fenced_off(holder)

    def may_remove_own(self, name: str) -> bool:
        """Return True if what this writer has written under a name is nobody's any more."""
        holder = newest(self._records)
        return holder is not None and name in (*holder.abandoned, *holder.removing)

    def release(self) -> None:
        """Let anybody claim the folder. A claim that was lost needs no release."""
        if not self._claim.released:
            try:
                self._add(released=True)
            except FencedOff:
                return

    def _add(self, **changes: Any) -> None:
        with self._lock:
            before = self._claim
            # If somebody has removed the claims by hand, the folder is taken over, too.
            self.check()
            after = replace(before, number=before.number + 1, **changes)
            if not self._records.create(after.number, after.as_json()):
                raise self._fenced_off(newest(self._records))
            self._claim = after
            # The record that claimed the folder stays: an old writer that wakes up finds the
            # number taken that it would use next.
            if before.number != before.since:
                self._records.remove(before.number)

    def _fenced_off(self, holder: Claim | None) -> FencedOff:
        other = str(holder.writer) if holder else "somebody who removed the claims"
        return FencedOff(
            f"checkpoint: {other} has taken over {self._folder}; this program "
            f"({self._claim.writer}) stops and has changed nothing there since"
        )


def claim_folder(
    folder: str,
    records: ClaimRecords,
    writer: Writer,
    *,
    is_complete: Callable[[str], bool],
    is_over: bool = False,
) -> Fence:
    """Claim a folder for a writer. Raises UserError with the reason if it may not have it.

    `is_complete` returns True if the checkpoint of a name is complete, so that nobody writes to it
    any more.
    """
    for _ in range(TRIES):
        holder = newest(records)
        reason = refusal(holder, writer, is_over=is_over)
        if reason:
            raise UserError(
                f"checkpoint: {folder} cannot be used: {reason}; name another folder, or if you "
                f"are sure that no such program runs any more, remove {folder}/drumline/claims"
            )
        abandoned: tuple[str, ...] = ()
        if holder is not None:
            name = holder.writing
            unfinished = [name] if name and not is_complete(name) else []
            abandoned = (*holder.abandoned, *unfinished, *holder.removing)
        number = holder.number + 1 if holder else 1
        claim = Claim(number, number, writer, abandoned=tuple(dict.fromkeys(abandoned)))
        if not records.create(number, claim.as_json()):
            continue
        # The number may have been free because the holder has added records since, and removed it.
        if max(records.numbers(), default=0) == number:
            if holder is not None and holder.number != holder.since:
                records.remove(holder.number)
            return Fence(folder, records, claim)
        records.remove(number)
    raise UserError(f"checkpoint: {folder} cannot be used: other programs keep claiming it")
