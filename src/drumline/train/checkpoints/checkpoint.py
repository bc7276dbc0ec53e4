"""Checkpoints that can be believed: whole or not there, and checked bit by bit when read.

Orbax writes them in the background, all hosts at once, into `<folder>/<step>` or `gs://…/<step>`,
and marks one as committed when everything of it is there. Beside the arrays stands a sum over their
bits (digest.py), taken on the devices before anything was written. What is read must give that sum
again; where it does not, or cannot be read at all, the checkpoint before is taken instead.

The folder may hold other things too, whatever their names: only what has our mark (marks.py), or
the name that Orbax gives to what it has not finished, is ever removed. Every write and every
removal is announced to the fence first (fence.py), so of two programs that write to one folder one
stops.
"""

# mypy: allow-untyped-calls

import gc
import logging
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp  # type: ignore[import-untyped]
from etils import epath  # type: ignore[import-untyped]
from jax.sharding import Mesh

from drumline.train.agree import as_host_0_says, hosts_without
from drumline.train.checkpoints.digest import digest
from drumline.train.checkpoints.fence import Fence, FencedOff
from drumline.train.checkpoints.files import COMMITTED, children, still_writable
from drumline.train.checkpoints.marks import Marks
from drumline.train.mistakes import Mistake
from drumline.train.state import State, dotted, everywhere, on_all, steps_taken

_MISFIT = "does not fit the recipe"
RECORDS, DIGEST = "records", "digest"
"""The names of what stands beside the state: the position in the data, and the sums."""
OF_OLD = "position"
"""What stood in place of `records` up to version 0.1: the position, counted in batches."""
_OURS = {RECORDS, DIGEST, OF_OLD}
_NAME = re.compile(r"(\d+)(?:\.(\d+))?")
"""The folder of a checkpoint: its step, and the number of the writer's claim where an earlier
writer may still write to the folder that is named by the step alone."""
_UNFINISHED = re.compile(rf"({_NAME.pattern})\.orbax-checkpoint-tmp.*")
"""The folder on a disk into which Orbax writes until the checkpoint is complete."""


@dataclass(frozen=True)
class Saved:
    """A state and what goes with it."""

    state: State
    taken: int
    """Records of the data that led to it."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """The recipe and the data it comes from (provenance.py); empty where that is not known."""
    checked: bool = False
    """Whether every part of it was held by several devices, and they agreed."""


def kept(steps: Iterable[int], last: int, every: int | None) -> set[int]:
    """Which checkpoints stay: the newest ones, and those at multiples of `every`."""
    by_age = sorted(steps)
    return {*by_age[-last:], *(step for step in by_age if every and step % every == 0)}


class Checkpoints:
    """The checkpoints of one run. Called by all hosts alike; host 0 clears up."""

    def __init__(
        self,
        folder: str,
        keep: Callable[[Iterable[int]], set[int]],
        say: Callable[[str], None],
        fence: Fence | None,
        last: int = 0,
    ) -> None:
        """Remove what an earlier attempt left half-written.

        Host 0 has the fence of the folder, all others have None. `last` is the run's last step: up
        to there, nothing of somebody else's may be in the way.
        """
        self.committed: int | None = None
        """The newest checkpoint that is whole, as far as this host knows."""
        self._folder = epath.Path(folder)
        self._keep, self._say, self._fence = keep, say, fence
        self._damaged: set[int] = set()
        self._marks = Marks(folder)
        self._last = last
        self._writer = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        logging.getLogger("absl").addFilter(_has_no_traceback)
        self._waiting: threading.Thread | None = None
        self._failure: Exception | None = None
        if fence is not None:
            self._clear(fence)
        complete = self._complete(fence.abandoned) if fence else {}
        steps, claims = (as_host_0_says(list(numbers)) for numbers in _columns(complete))
        self._claims = dict(zip(steps, claims, strict=True))
        """The step of each checkpoint → the number in its name; 0 if the name is only the step."""
        self._claim = (as_host_0_says([fence.number] if fence else [0]) or [0])[0]
        taken = [int(name) for name in fence.abandoned if name.isdigit()] if fence else []
        self._unusable = set(as_host_0_says(sorted(taken)))
        """Steps whose plain name an earlier writer may still write to."""
        self._steps = set(steps)
        self._ours = self._steps_marked(lambda marks: marks.names())
        """The checkpoints that may be removed or replaced."""
        self._checked = self._steps_marked(lambda marks: marks.said("checked"))
        self._suspects = self._steps_marked(lambda marks: marks.said("suspect"))
        self._written: set[int] = set()
        """By this attempt, on the hardware of this attempt."""
        self._from: int | None = None
        """The checkpoint of an earlier attempt that this one went on from."""

    def save(
        self, step: int, saved: Saved, mesh: Mesh, committed: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to write a checkpoint. Returns when the state may be changed again."""
        self.wait()
        replaced = step in self._suspects | self._damaged
        if step not in self._steps and step in self._unusable:
            self._claims[step] = self._claim
        name = self._name(step)
        if self._fence is not None:
            if step not in self._ours and self._path(step).exists():
                raise self._taken(step)
            with still_writable(str(self._folder)):
                self._fence.begin_write(name, removing=[name] if replaced else ())
                if replaced:
                    # Before the new mark, which says nothing of a suspect.
                    self._remove(name)
                self._marks.put(name, saved.provenance, checked=saved.checked, claim=self._claim)
        self._ours.add(step)
        self._written.add(step)
        (self._checked.add if saved.checked else self._checked.discard)(step)
        self._suspects.discard(step)
        tree = {**_tree(saved.state), RECORDS: everywhere(mesh, _words(saved.taken))}
        tree[DIGEST] = self._digest(mesh)(list(tree.values()))
        arguments = ocp.args.PyTreeSave(tree)
        with still_writable(str(self._folder)):
            try:
                self._writer.save(self._path(step), args=arguments, force=replaced)
            except Exception as error:
                reason = self._explain(error, name)
                if reason is error:
                    raise
                raise reason from error
        self._waiting = threading.Thread(
            target=self._commit, args=(step, committed), name="checkpoint", daemon=True
        )
        self._waiting.start()

    def wait(self) -> None:
        """Come back when nothing is being written; raises what went wrong in the background."""
        if self._waiting is not None:
            self._waiting.join()
            self._waiting = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            with still_writable(str(self._folder)):
                raise failure

    def restore(self, like: State, mesh: Mesh, batch: int = 1) -> Saved | None:
        """The newest good checkpoint, laid out anew; None where there has never been one.

        `batch` is for checkpoints of older versions, which counted batches and not records.
        """
        self.wait()
        troubles = []
        for step in sorted(self._steps - self._damaged, reverse=True):
            if step in self._suspects:
                self._say(
                    f"passing over checkpoint {step}: the hardware that wrote it computed wrong, "
                    "and nobody has checked it"
                )
                self._damaged.add(step)
                continue
            found, trouble = self._read(step, like, mesh, batch)
            if found is not None:
                self.committed = step
                # Whole, of this recipe's shape, and with our sums: it is ours, marked or not.
                self._ours.add(step)
                if step not in self._written:  # to which a rollback goes
                    self._from = step
                self._check_free(step)
                return found
            troubles.append(f"checkpoint {step} {trouble}")
            self._say(f"{troubles[-1]}; trying the one before")
            self._damaged.add(step)
        if troubles:
            raise Mistake(
                f"checkpoint: none of the {len(troubles)} in {self._folder} can be used: "
                f"{troubles[0]}; to begin anew, name another folder"
            )
        self._check_free(0)
        return None

    def newest(self, to: int) -> int:
        """The newest checkpoint that is not after a step; 0 where there is none.

        What is being written counts, so that all hosts name the same.
        """
        self.wait()
        good = self._steps - self._damaged - self._suspects
        return max((step for step in good if step <= to), default=0)

    def read(self, step: int, like: State, mesh: Mesh, batch: int = 1) -> Saved | None:
        """One checkpoint, laid out anew; None where it cannot be read."""
        self.wait()
        return self._read(step, like, mesh, batch)[0]

    def condemn(self, why: str, *, wait: bool) -> list[int]:
        """Let nobody go on from what this attempt wrote and could not check.

        What an earlier attempt wrote stays as it is: that was other hardware. `wait` for what is
        being written only where all hosts do.
        """
        if wait:
            with suppress(Exception):
                self.wait()
        condemned = sorted(self._written - self._checked)
        # A host that has found it alone cannot leave it to the first. The newest comes first, as
        # the next attempt would go on from that.
        for step in reversed(condemned) if _first() or not wait else []:
            with suppress(OSError):
                self._marks.suspect(self._name(step), why, self._claim)
        self._suspects |= set(condemned)
        return condemned

    def close(self) -> None:
        """Wait for what is being written, and give the threads back."""
        self.wait()
        self._writer.close()

    def _complete(self, abandoned: Iterable[str]) -> dict[int, int]:
        """The complete checkpoints: each step, and the number in its name, 0 if it has none."""
        names = {path.name for path in children(self._folder)} - {*abandoned}
        matches = [match for match in map(_NAME.fullmatch, sorted(names)) if match]
        found: dict[int, int] = {}
        for match in matches:
            if (self._folder / match[0] / COMMITTED).exists():
                step, number = int(match[1]), int(match[2] or 0)
                found[step] = max(number, found.get(step, 0))
        return dict(sorted(found.items()))

    def _steps_marked(self, names: Callable[[Marks], set[str]]) -> set[int]:
        """The steps of those checkpoints that have a certain mark, on every host."""
        marked = names(self._marks) if self._fence else set()
        return set(as_host_0_says(sorted(s for s in self._steps if self._name(s) in marked)))

    def _clear(self, fence: Fence) -> None:
        """Remove what a process that died has left: checkpoints half-written or half-removed."""
        names = {path.name for path in children(self._folder)}
        marked = self._marks.names()
        unfinished = {name: match for name in names if (match := _UNFINISHED.fullmatch(name))}
        dead = {name for name in fence.abandoned if name in names | marked}
        dead |= {name for name in marked if not (self._folder / name / COMMITTED).exists()}
        if unfinished or dead:
            fence.begin_removal({*dead, *(match[1] for match in unfinished.values())})
        for name in unfinished:
            (self._folder / name).rmtree()
        for name in dead:
            self._remove(name)
        self._marks.clear_drafts()

    def _check_free(self, step: int) -> None:
        """Refuse a folder where something of somebody else's is in the way from here on."""
        names = [path.name for path in children(self._folder)] if _first() else []
        numbers = {int(name) for name in names if name.isdigit()} - self._unusable
        ahead = sorted(n for n in numbers - self._ours if step < n <= self._last)
        in_the_way = as_host_0_says(ahead)
        if in_the_way:
            raise self._taken(in_the_way[0])

    def _taken(self, step: int) -> Mistake:
        return Mistake(
            f"checkpoint: {self._path(step)} is no checkpoint of this program, and stands where "
            f"step {step:,} would be saved; move it away, or name another folder"
        )

    def _name(self, step: int) -> str:
        claim = self._claims.get(step, 0)
        return f"{step}.{claim}" if claim else str(step)

    def _path(self, step: int) -> epath.Path:
        return self._folder / self._name(step)

    def _digest(self, mesh: Mesh) -> Callable[[list[Any]], jax.Array]:
        return jax.jit(digest, out_shardings=on_all(mesh))

    @cached_property
    def _reader(self) -> ocp.Checkpointer:
        # Every host for itself: one that fails must not leave the others at a barrier.
        alone = ocp.options.MultiprocessingOptions(
            primary_host=jax.process_index(), active_processes={jax.process_index()}
        )
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler(), multiprocessing_options=alone)

    def _read(self, step: int, like: State, mesh: Mesh, batch: int) -> tuple[Saved | None, str]:
        """A checkpoint, or what is wrong with it; all hosts come to the same answer."""
        tree, trouble = None, ""
        with _hushed():
            try:
                tree = self._read_here(step, _tree(like), mesh)
            except Mistake as error:
                trouble = f"{_MISFIT} ({error})"
            except Exception as error:
                # Damage shows in as many ways as there are bytes; none of them may end the run.
                trouble = f"is damaged ({_in_a_line(error)})"
            if tree is None:
                gc.collect()
        failed = hosts_without(tree is not None)
        if failed:
            return None, trouble or f"is damaged (host {failed[0]} cannot read it)"
        assert tree is not None
        written = np.asarray(tree.pop(DIGEST))
        read = np.asarray(self._digest(mesh)(list(tree.values())))
        differs = np.flatnonzero((written != read).any(axis=1))
        if differs.size:
            name = list(tree)[differs[0]]
            return None, f"is damaged (the bits of {name} are not those that were saved)"
        *leaves, position = tree.values()
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        taken = int(position) * batch if OF_OLD in tree else _number(position)
        saved_step = steps_taken(state)
        if saved_step != step:
            return None, f"is damaged (it holds step {saved_step:,})"
        return Saved(state, taken, self._marks.read(self._name(step)) or {}), ""

    def _read_here(self, step: int, wanted: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
        path = self._path(step)
        contents = self._reader.metadata(path).item_metadata
        if contents is None:
            raise ValueError("what belongs to it cannot be read")
        there = contents.tree
        _check_fits({k: v for k, v in there.items() if k not in _OURS}, wanted)
        # What stands beside the state has the same shape whatever the recipe.
        position = OF_OLD if OF_OLD in there else RECORDS
        shapes = {position: () if position == OF_OLD else (2,), DIGEST: (len(wanted) + 1, 2)}
        for name, shape in shapes.items():
            if name not in there or tuple(there[name].shape) != shape:
                raise ValueError(f"{name} is not in it as it should be")
            dtype = np.int32 if name == OF_OLD else np.uint32
            wanted[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=on_all(mesh))
        arguments = ocp.checkpoint_utils.construct_restore_args(wanted)
        tree = self._reader.restore(path, args=ocp.args.PyTreeRestore(wanted, arguments))
        return {name: tree[name] for name in wanted}

    def _commit(self, step: int, committed: Callable[[], None]) -> None:
        """In the background: wait until it is complete, then remove those no longer kept."""
        try:
            self._writer.wait_until_finished()
            steps = self._steps | {step}
            keep = self._keep(steps - self._damaged | {step}) | self._to_fall_back_on(step)
            gone = (steps - keep) & self._ours
            if self._fence is not None:
                self._fence.begin_removal(self._name(old) for old in gone)
            self.committed = step
            self._damaged.discard(step)
            for old in gone:
                if self._fence is not None:
                    self._remove(self._name(old))
                self._claims.pop(old, None)
            self._steps = steps - gone
            self._written -= gone
            if self._fence is not None:
                self._fence.check()
            committed()
        except Exception as error:
            self._failure = self._explain(error, self._name(step))

    def _explain(self, error: Exception, name: str) -> Exception:
        """Return the reason why a checkpoint could not be written, and remove what there is of it.

        A program that was fenced off may also meet errors because the new writer has removed what
        it had begun.
        """
        if self._fence is None:
            return error
        try:
            self._fence.check()
        except FencedOff as lost:
            error = lost
        except OSError:
            return error
        with suppress(OSError):
            if not isinstance(error, FencedOff) or self._fence.may_remove_own(name):
                for path in children(self._folder):
                    match = _UNFINISHED.fullmatch(path.name)
                    if match and match[1] == name:
                        path.rmtree()
        with suppress(OSError):
            if isinstance(error, FencedOff) and self._fence.may_remove_own(name):
                self._remove(name)
        return error

    def _to_fall_back_on(self, newest: int) -> set[int]:
        """What is left if all that came after it turns out to be wrong: it outlives its turn.

        That is the newest that was checked, or else the one that other hardware left.
        """
        good = self._steps - self._damaged | {newest}
        proven = (self._checked | {self._from}) & good
        return {max(step for step in proven if step is not None)} if proven else set()

    def _remove(self, name: str) -> None:
        # Orbax's mark first: one that is removed half-way must not look whole. Ours last: it must
        # not look like somebody else's either.
        path = self._folder / name
        (path / COMMITTED).unlink(missing_ok=True)
        if path.exists():
            path.rmtree()
        self._marks.remove(name)


@contextmanager
def _hushed() -> Iterator[None]:
    """Keep quiet about what is left of a read that failed: its other parts, cut off half-way."""
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = before if getattr(before, "hushes", False) else _without_late(before)


def _without_late(before: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Tensorstore may report the rest of such a read later still, to a loop that has ended."""

    def report(what: Any) -> None:
        late = isinstance(what.exc_value, RuntimeError) and "loop is closed" in str(what.exc_value)
        if not late:
            before(what)

    report.hushes = True  # type: ignore[attr-defined]
    return report


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Orbax logs the errors of its threads with tracebacks. It also raises them, in `wait`."""
    return not record.exc_info


def _in_a_line(error: BaseException) -> str:
    """What it says at its root, short enough to stand in a sentence."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = str(error).strip().splitlines() or [type(error).__name__]
    return said[0][:160]


def _first() -> bool:
    return jax.process_index() == 0


def _columns(table: Mapping[int, int]) -> tuple[list[int], list[int]]:
    return list(table), list(table.values())


def _tree(state: Any) -> dict[str, Any]:
    """Every array of a state under its name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    named = {dotted(path): leaf for path, leaf in leaves}
    if len(named) != len(leaves) or not named.keys().isdisjoint(_OURS):
        raise Mistake("params: two parameters have one name when their places are joined by dots")
    return named


def _check_fits(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model or another optimizer, in their own words."""
    for part, whose in (("params", "model"), ("opt_state", "optimizer"), ("", "run")):
        old, new = ({n: a for n, a in t.items() if n.startswith(part)} for t in (there, wanted))
        for name in sorted({*old} & {*new}):
            for what, of in (("shape", lambda a: tuple(a.shape)), ("type", lambda a: str(a.dtype))):
                if of(old[name]) != of(new[name]):
                    differs = f"{of(old[name])} there and {of(new[name])} in the recipe"
                    raise Mistake(f"{name} has {what} {differs}")
        if {*old} != {*new}:
            told = [
                f"{_several(names)} in {where} alone"
                for names, where in (({*old} - {*new}, "it"), ({*new} - {*old}, "the recipe"))
                if names
            ]
            raise Mistake(f"it is of another {whose}: {' and '.join(told)}")


def _several(names: set[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{min(names)}{more}"


def _words(number: int) -> np.ndarray:
    """A number that may outgrow 32 bits: on the devices there are no wider ones by default."""
    return np.asarray([number & 0xFFFFFFFF, number >> 32], np.uint32)


def _number(words: jax.Array) -> int:
    low, high = np.asarray(words.addressable_data(0)).tolist()
    return int(low) | int(high) << 32
