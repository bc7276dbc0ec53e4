"""Checkpoints that are complete or ignored, and verified bit by bit when they are read.

Orbax writes them in the background, on all hosts at once, into `<folder>/<step>` or
`gs://…/<step>`, and marks a checkpoint as committed once it is complete. Each contains a checksum
of its arrays (checksums.py) that the devices computed before anything was written. If the arrays
that are read have a different checksum, or cannot be read, the previous checkpoint is used.

The folder may contain other files with any names. Only checkpoints with a mark of Drumline
(marks.py), and folders with the name of an unfinished Orbax checkpoint, are ever removed. Every
write and every removal is first announced to the fence (fence.py). So of two programs that write
to the same folder, one stops.
"""

# mypy: allow-untyped-calls

import gc
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from etils import epath  # type: ignore[import-untyped]
from jax.sharding import Mesh, NamedSharding

from drumline.errors import UserError
from drumline.train.checkpoints.fence import Fence, FencedOff
from drumline.train.checkpoints.files import (
    COMMITTED,
    list_folder,
    raise_checkpoint_errors,
    remove_folder,
)
from drumline.train.checkpoints.marks import Marks
from drumline.train.checksums import digest
from drumline.train.multihost import broadcast_from_host_0, failed_hosts
from drumline.train.state import State, path_name, replicate, replicated, step_number

RECORDS, DIGEST = "records", "digest"
"""The names of the data position and of the checksums, which are stored beside the state."""
PARAMS = "params"
"""The name before those of the parameters."""
OLD_POSITION = "position"
"""The name of the position up to version 0.1, where it was a number of batches."""
_EXTRA_NAMES = {RECORDS, DIGEST, OLD_POSITION}
_NAME = re.compile(r"(\d+)(?:\.(\d+))?")
"""The folder name of a checkpoint: its step. If an earlier writer may still write to the folder of
this name, the number of the current writer's claim follows."""
_UNFINISHED = re.compile(rf"({_NAME.pattern})\.orbax-checkpoint-tmp.*")
"""The folder on a disk into which Orbax writes until the checkpoint is complete."""


@dataclass(frozen=True)
class Saved:
    """A state with its data position and provenance."""

    state: State
    position: int
    """The number of records consumed."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """Its recipe and data (provenance.py); empty if they are unknown."""
    checked: bool = False
    """True if every array had replicas on several devices and they were equal."""


def steps_to_keep(steps: Iterable[int], last: int, every: int | None) -> set[int]:
    """Return the checkpoints to keep: the last ones, and those at multiples of `every`."""
    in_order = sorted(steps)
    return {*in_order[-last:], *(step for step in in_order if every and step % every == 0)}


class Checkpoints:
    """The checkpoints in a folder. All hosts make the same calls; host 0 removes files."""

    def __init__(
        self,
        folder: str,
        keep: Callable[[Iterable[int]], set[int]],
        log: Callable[[str], None],
        fence: Fence | None,
        last_step: int = 0,
    ) -> None:
        """Remove incomplete checkpoints of an earlier attempt.

        Host 0 has the fence of the folder, all other hosts have None. `last_step` is the last step
        of the run. Up to this step, no other file may have the name of a checkpoint.
        """
        self.committed: int | None = None
        """The newest complete checkpoint, as far as this host knows."""
        self.write_seconds = 0.0
        """The seconds from the start of the newest save until its checkpoint was complete."""
        self._folder = epath.Path(folder)
        self._keep, self._log, self._fence = keep, log, fence
        self._damaged: set[int] = set()
        self._marks = Marks(folder)
        self._last_step = last_step
        self._writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        logging.getLogger("absl").addFilter(_has_no_traceback)
        logging.getLogger("asyncio").addFilter(_is_not_of_orbax)
        _hide_late_errors()
        self._commit_thread: threading.Thread | None = None
        self._error: Exception | None = None
        if fence is not None:
            self._remove_incomplete(fence)
        complete = self._find_complete(fence.abandoned) if fence else {}
        steps = broadcast_from_host_0(list(complete))
        claims = broadcast_from_host_0(list(complete.values()))
        self._claims = dict(zip(steps, claims, strict=True))
        """The number of the claim in each checkpoint's name; 0 if the name has none."""
        self._claim = (broadcast_from_host_0([fence.number] if fence else [0]) or [0])[0]
        abandoned = [int(name) for name in fence.abandoned if name.isdigit()] if fence else []
        self._abandoned = set(broadcast_from_host_0(sorted(abandoned)))
        """The steps whose name without a claim must not be used (fence.py)."""
        self._steps = set(steps)
        self._owned = self._steps_with(lambda marks: marks.names())
        """The checkpoints that may be removed or replaced."""
        self._checked = self._steps_with(lambda marks: marks.names_with("checked"))
        self._suspects = self._steps_with(lambda marks: marks.names_with("suspect"))
        self._written: set[int] = set()
        """The checkpoints that this attempt has written."""
        self._resumed_from: int | None = None
        """The checkpoint of an earlier attempt from which this attempt resumed."""

    def save(
        self, step: int, saved: Saved, mesh: Mesh, on_commit: Callable[[], None] = lambda: None
    ) -> float:
        """Start to write a checkpoint. Return as soon as the state may change.

        Return the seconds that this waited for the previous checkpoint.
        """
        began_at = time.monotonic()
        self.wait()
        waited = time.monotonic() - began_at
        replaces = step in self._suspects | self._damaged
        if step not in self._steps and step in self._abandoned:
            self._claims[step] = self._claim
        name = self._name(step)
        if self._fence is not None:
            if step not in self._owned and self._path(step).exists():
                raise self._name_conflict(step)
            with raise_checkpoint_errors(str(self._folder)):
                self._fence.begin_write(name, removing=[name] if replaces else ())
                if replaces:
                    # Remove it before the new mark is written, which has no suspect flag.
                    self._remove(name)
                self._marks.put(name, saved.provenance, checked=saved.checked, claim=self._claim)
        self._owned.add(step)
        self._written.add(step)
        (self._checked.add if saved.checked else self._checked.discard)(step)
        self._suspects.discard(step)
        tree = {**_named_leaves(saved.state), RECORDS: replicate(mesh, _to_words(saved.position))}
        tree[DIGEST] = self._digest(mesh)(list(tree.values()))
        arguments = ocp.args.PyTreeSave(tree)
        with raise_checkpoint_errors(str(self._folder)):
            try:
                self._writer.save(self._path(step), args=arguments, force=replaces)
            except Exception as error:
                explanation = self._explain(error, name)
                if explanation is error:
                    raise
                raise explanation from error
        self._commit_thread = threading.Thread(
            target=self._commit,
            args=(step, on_commit, began_at + waited),
            name="checkpoint",
            daemon=True,
        )
        self._commit_thread.start()
        return waited

    def wait(self) -> None:
        """Wait for the checkpoint in progress. Raises an error of the background thread."""
        if self._commit_thread is not None:
            self._commit_thread.join()
            self._commit_thread = None
        if self._error is not None:
            error, self._error = self._error, None
            with raise_checkpoint_errors(str(self._folder)):
                raise error

    def restore(self, abstract_state: State, mesh: Mesh, batch: int = 1) -> Saved | None:
        """Return the newest usable checkpoint with these shardings, or None in an empty folder.

        `batch` is for checkpoints of version 0.1, which count batches instead of records. Raises
        UserError if none of the checkpoints can be used.
        """
        self.wait()
        failures = []
        for step in sorted(self._steps - self._damaged, reverse=True):
            if step in self._suspects:
                self._log(
                    f"skipping checkpoint {step}: the hardware that wrote it computed wrong "
                    "results, and the checkpoint was not verified"
                )
                self._damaged.add(step)
                continue
            saved, failure = self._read(step, abstract_state, mesh, batch)
            if saved is not None:
                self.committed = step
                # It has Drumline's checksums, so it is Drumline's even without a mark.
                self._owned.add(step)
                if step not in self._written:  # Otherwise this is a rollback.
                    self._resumed_from = step
                self._check_names_free(step)
                return saved
            failures.append(f"checkpoint {step} {failure}")
            self._log(f"{failures[-1]}; trying the previous checkpoint")
            self._damaged.add(step)
        if failures:
            raise UserError(
                f"checkpoint: none of the {len(failures)} in {self._folder} can be used: "
                f"{failures[0]}; to start from scratch, name another folder"
            )
        self._check_names_free(0)
        return None

    def newest_until(self, step: int) -> int:
        """Return the newest usable checkpoint up to a step, or 0 if there is none.

        A checkpoint in progress counts, so that all hosts return the same.
        """
        self.wait()
        usable = self._steps - self._damaged - self._suspects
        return max((other for other in usable if other <= step), default=0)

    def read(self, step: int, abstract_state: State, mesh: Mesh, batch: int = 1) -> Saved | None:
        """Return a checkpoint with these shardings, or None if it cannot be read."""
        self.wait()
        return self._read(step, abstract_state, mesh, batch)[0]

    def mark_suspect(self, reason: str, *, wait: bool) -> list[int]:
        """Mark what this attempt wrote and could not verify, so that no run resumes from it.

        Return the steps. Checkpoints of earlier attempts stay as they are, because other hardware
        wrote them. `wait` for the checkpoint in progress only if all hosts do.
        """
        if wait:
            with suppress(Exception):
                self.wait()
        suspects = sorted(self._written - self._checked)
        # If only this host knows of the fault, it cannot leave the marks to host 0. The newest is
        # marked first, because the next attempt would resume from it.
        for step in reversed(suspects) if _is_host_0() or not wait else []:
            with suppress(OSError):
                self._marks.mark_suspect(self._name(step), reason, self._claim)
        self._suspects |= set(suspects)
        return suspects

    def close(self) -> None:
        """Wait for the checkpoint in progress, and end the threads."""
        self.wait()
        self._writer.close()

    # The folder -----------------------------------------------------------------------------------

    def _find_complete(self, abandoned: Iterable[str]) -> dict[int, int]:
        """Return the complete checkpoints: each step with the claim in its name, 0 if none."""
        names = {path.name for path in list_folder(self._folder)} - {*abandoned}
        matches = [match for match in map(_NAME.fullmatch, sorted(names)) if match]
        claims: dict[int, int] = {}
        for match in matches:
            if (self._folder / match[0] / COMMITTED).exists():
                step, claim = int(match[1]), int(match[2] or 0)
                claims[step] = max(claim, claims.get(step, 0))
        return dict(sorted(claims.items()))

    def _steps_with(self, names: Callable[[Marks], set[str]]) -> set[int]:
        """Return, on every host, the steps of the checkpoints with certain marks."""
        marked = names(self._marks) if self._fence else set()
        steps = sorted(step for step in self._steps if self._name(step) in marked)
        return set(broadcast_from_host_0(steps))

    def _remove_incomplete(self, fence: Fence) -> None:
        """Remove the incomplete checkpoints of a process that died."""
        names = {path.name for path in list_folder(self._folder)}
        marked = self._marks.names()
        unfinished = {name: match for name in names if (match := _UNFINISHED.fullmatch(name))}
        incomplete = {name for name in fence.abandoned if name in names | marked}
        incomplete |= {name for name in marked if not (self._folder / name / COMMITTED).exists()}
        if unfinished or incomplete:
            fence.begin_removal({*incomplete, *(match[1] for match in unfinished.values())})
        for name in unfinished:
            remove_folder(self._folder / name)
        for name in incomplete:
            self._remove(name)
        self._marks.clear_drafts()

    def _check_names_free(self, step: int) -> None:
        """Raise UserError if a foreign file has the name of a checkpoint after this step."""
        names = [path.name for path in list_folder(self._folder)] if _is_host_0() else []
        steps = {int(name) for name in names if name.isdigit()} - self._abandoned - self._owned
        conflicts = broadcast_from_host_0(sorted(s for s in steps if step < s <= self._last_step))
        if conflicts:
            raise self._name_conflict(conflicts[0])

    def _name_conflict(self, step: int) -> UserError:
        return UserError(
            f"checkpoint: {self._path(step)} was not written by Drumline, and step {step:,} would "
            "be saved there; move it away, or name another folder"
        )

    def _name(self, step: int) -> str:
        claim = self._claims.get(step, 0)
        return f"{step}.{claim}" if claim else str(step)

    def _path(self, step: int) -> epath.Path:
        return self._folder / self._name(step)

    def _remove(self, name: str) -> None:
        # Remove Orbax's mark first, so that the checkpoint is incomplete from then on. Remove
        # Drumline's mark last, so that a later attempt can remove the rest.
        path = self._folder / name
        # What a link leads to is not Drumline's to remove.
        if not os.path.islink(str(path)):
            (path / COMMITTED).unlink(missing_ok=True)
        if path.exists() or os.path.islink(str(path)):
            remove_folder(path)
        self._marks.remove(name)

    # Reading --------------------------------------------------------------------------------------

    def _digest(self, mesh: Mesh) -> Callable[[list[Any]], jax.Array]:
        return jax.jit(digest, out_shardings=replicated(mesh))

    @cached_property
    def _reader(self) -> ocp.Checkpointer:
        return make_reader()

    def _read(
        self, step: int, abstract_state: State, mesh: Mesh, batch: int
    ) -> tuple[Saved | None, str]:
        """Return a checkpoint, or None and the reason. All hosts return the same."""
        tree, failure = None, ""
        with _ignore_unraisable_errors():
            try:
                tree = self._read_local(step, _named_leaves(abstract_state), mesh)
            except UserError as error:
                failure = f"does not fit the recipe ({error})"
            except Exception as error:
                # Damaged files raise all kinds of errors, and none may end the run.
                failure = f"is damaged ({root_message(error)})"
            if tree is None:
                gc.collect()
        failed = failed_hosts(tree is not None)
        if failed:
            return None, failure or f"is damaged (host {failed[0]} cannot read it)"
        assert tree is not None
        expected = np.asarray(tree.pop(DIGEST))
        actual = np.asarray(self._digest(mesh)(list(tree.values())))
        differing = np.flatnonzero((expected != actual).any(axis=1))
        if differing.size:
            name = list(tree)[differing[0]]
            return None, f"is damaged (the bits of {name} are not those that were saved)"
        *leaves, position = tree.values()
        state = jax.tree.unflatten(jax.tree.structure(abstract_state), leaves)
        records = int(position) * batch if OLD_POSITION in tree else _from_words(position)
        saved_step = step_number(state)
        if saved_step != step:
            return None, f"is damaged (it holds step {saved_step:,})"
        return Saved(state, records, self._marks.read(self._name(step)) or {}), ""

    def _read_local(self, step: int, leaves: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
        """Read the arrays of a checkpoint on this host. `leaves` are their shapes by name."""
        path = self._path(step)
        metadata = self._reader.metadata(path).item_metadata
        if metadata is None:
            raise ValueError("its metadata cannot be read")
        stored = metadata.tree
        _check_fits({k: v for k, v in stored.items() if k not in _EXTRA_NAMES}, leaves)
        position = OLD_POSITION if OLD_POSITION in stored else RECORDS
        shapes = {position: () if position == OLD_POSITION else (2,), DIGEST: (len(leaves) + 1, 2)}
        for name, shape in shapes.items():
            if name not in stored or tuple(stored[name].shape) != shape:
                raise ValueError(f"{name} is missing or has a wrong shape")
            dtype = np.int32 if name == OLD_POSITION else np.uint32
            leaves[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=replicated(mesh))
        arguments = ocp.checkpoint_utils.construct_restore_args(leaves)
        tree = self._reader.restore(path, args=ocp.args.PyTreeRestore(leaves, arguments))
        return {name: tree[name] for name in leaves}

    # Writing --------------------------------------------------------------------------------------

    def _commit(self, step: int, on_commit: Callable[[], None], began_at: float) -> None:
        """Wait for a checkpoint in the background, then remove those that are no longer kept."""
        try:
            self._writer.wait_until_finished()
            self.write_seconds = time.monotonic() - began_at
            steps = self._steps | {step}
            keep = self._keep(steps - self._damaged | {step}) | self._fallback(step)
            obsolete = (steps - keep) & self._owned
            if self._fence is not None:
                self._fence.begin_removal(self._name(other) for other in obsolete)
            self.committed = step
            self._damaged.discard(step)
            for other in obsolete:
                if self._fence is not None:
                    self._remove(self._name(other))
                self._claims.pop(other, None)
            self._steps = steps - obsolete
            self._written -= obsolete
            if self._fence is not None:
                self._fence.check()
            on_commit()
        except Exception as error:
            self._error = self._explain(error, self._name(step))

    def _explain(self, error: Exception, name: str) -> Exception:
        """Return the reason why a checkpoint could not be written, and remove its files.

        If a new writer has taken over, this is FencedOff: the new writer removes unfinished files,
        which causes other errors.
        """
        if self._fence is None:
            return error
        try:
            self._fence.check()
        except FencedOff as fenced_off:
            error = fenced_off
        except OSError:
            return error
        with suppress(OSError):
            if not isinstance(error, FencedOff) or self._fence.may_remove_own(name):
                for path in list_folder(self._folder):
                    match = _UNFINISHED.fullmatch(path.name)
                    if match and match[1] == name:
                        remove_folder(path)
        with suppress(OSError):
            if isinstance(error, FencedOff) and self._fence.may_remove_own(name):
                self._remove(name)
        return error

    def _fallback(self, newest: int) -> set[int]:
        """Return the checkpoint to use if all later ones turn out to be wrong. It is always kept.

        It is the newest that was verified or from which this attempt resumed.
        """
        usable = self._steps - self._damaged | {newest}
        proven = (self._checked | {self._resumed_from}) & usable
        return {max(step for step in proven if step is not None)} if proven else set()


# Reading without a run ----------------------------------------------------------------------------


def make_reader() -> ocp.Checkpointer:
    """Return a reader of checkpoints."""
    # Every host reads independently, so that a failure leaves no other host at a barrier.
    options = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=options)


def read_params(path: epath.Path, like: Any) -> Any:
    """Return the verified parameters of a checkpoint, as `load_params` does.

    Raises UserError if they do not fit `like`, and other errors if they cannot be read.
    """
    reader = make_reader()
    metadata = reader.metadata(path).item_metadata
    if metadata is None:
        raise ValueError("its metadata cannot be read")
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for name, leaf in metadata.tree.items()
        if name == PARAMS or name.startswith(f"{PARAMS}.")
    }
    if like is not None:
        named = _named_leaves({PARAMS: like})
        _check_fits(shapes, named)
        shapes = named
    arguments = {
        name: ocp.checkpoint_utils.construct_restore_args(leaf)
        if getattr(leaf, "sharding", None) is not None
        else ocp.RestoreArgs(restore_type=np.ndarray)
        for name, leaf in [*shapes.items(), (DIGEST, None)]
    }
    request = ocp.args.PyTreeRestore(shapes | {DIGEST: 0}, arguments, partial_restore=True)
    with _ignore_unraisable_errors():
        tree = reader.restore(path, args=request)
    expected = {tuple(row) for row in np.asarray(tree[DIGEST]).tolist()}
    for name in shapes:
        sharding = getattr(tree[name], "sharding", None)
        output = replicated(sharding.mesh) if isinstance(sharding, NamedSharding) else None
        sums = jax.jit(digest, out_shardings=output)([tree[name]]).addressable_data(0)
        if tuple(np.asarray(sums)[0].tolist()) not in expected:
            raise ValueError(f"the bits of {name} are not those that were saved")
    if like is not None:
        return jax.tree.unflatten(jax.tree.structure(like), [tree[name] for name in shapes])
    params: dict[str, Any] = {}
    for name in shapes:
        *parents, last = name.split(".")
        branch = params
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = tree[name]
    return params[PARAMS]


# Names and shapes ---------------------------------------------------------------------------------


def _named_leaves(state: Any) -> dict[str, Any]:
    """Return every array of a state under its name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    named = {path_name(path): leaf for path, leaf in leaves}
    if len(named) != len(leaves) or not named.keys().isdisjoint(_EXTRA_NAMES):
        raise UserError("params: two parameters have the same path when it is joined by dots")
    return named


def _check_fits(stored: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    """Raise UserError if a checkpoint has a different model or optimizer."""
    for prefix, part in (("params", "model"), ("opt_state", "optimizer"), ("", "run")):
        saved, current = (
            {n: a for n, a in t.items() if n.startswith(prefix)} for t in (stored, leaves)
        )
        for name in sorted({*saved} & {*current}):
            _check_equal(name, "shape", tuple(saved[name].shape), tuple(current[name].shape))
            _check_equal(name, "type", str(saved[name].dtype), str(current[name].dtype))
        if {*saved} != {*current}:
            differences = [
                f"only {owner} has {_summarize(names)}"
                for names, owner in (
                    ({*saved} - {*current}, "it"),
                    ({*current} - {*saved}, "the recipe"),
                )
                if names
            ]
            raise UserError(f"it is of another {part}: {' and '.join(differences)}")


def _check_equal(name: str, attribute: str, stored: object, expected: object) -> None:
    if stored != expected:
        raise UserError(f"{name} has {attribute} {stored} there and {expected} in the recipe")


def _summarize(names: set[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{min(names)}{more}"


def _to_words(number: int) -> np.ndarray:
    """Split a number into two 32-bit words, because JAX has no wider integers by default."""
    return np.asarray([number & 0xFFFFFFFF, number >> 32], np.uint32)


def _from_words(words: jax.Array) -> int:
    low, high = np.asarray(words.addressable_data(0)).tolist()
    return int(low) | int(high) << 32


def _is_host_0() -> bool:
    return jax.process_index() == 0


# Errors of Orbax and TensorStore ------------------------------------------------------------------


@contextmanager
def _ignore_unraisable_errors() -> Iterator[None]:
    """Ignore errors in the remaining parts of a read that has failed."""
    previous = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = previous


def _hide_late_errors() -> None:
    """Print no traceback when a thread of TensorStore reports to an event loop that has closed.

    After a failed read or write there can be dozens, and they would break up the message that
    says why it failed. The error of a thread that was started by Python is printed elsewhere.
    """
    if getattr(sys.excepthook, "hides_late_errors", False):
        return
    print_error, print_unraisable = sys.excepthook, sys.unraisablehook

    def excepthook(kind: Any, error: BaseException, traceback: Any) -> None:
        in_main_thread = threading.get_ident() == threading.main_thread().ident
        if in_main_thread or not _is_closed_loop(error):
            print_error(kind, error, traceback)

    def unraisablehook(unraisable: Any) -> None:
        if not _is_closed_loop(unraisable.exc_value):
            print_unraisable(unraisable)

    excepthook.hides_late_errors = True  # type: ignore[attr-defined]
    sys.excepthook, sys.unraisablehook = excepthook, unraisablehook


def _is_closed_loop(error: BaseException | None) -> bool:
    return isinstance(error, RuntimeError) and "loop is closed" in str(error)


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Drop log records of errors in Orbax's threads, because `wait` raises the errors."""
    return not record.exc_info


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Drop the reports of Orbax's tasks that fail beside the first, whose error `wait` raises."""
    message = record.getMessage()
    return not (message.startswith("Task exception was never retrieved") and "orbax" in message)


def root_message(error: BaseException) -> str:
    """Return the first line of the root cause, up to 160 characters."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]
