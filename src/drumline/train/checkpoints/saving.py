"""What a run takes up and leaves: the newest checkpoint at its start, new ones on its way."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from etils import epath  # type: ignore[import-untyped]

from drumline.train.agree import hosts_without
from drumline.train.checkpoints.checkpoint import Checkpoints, Saved, kept
from drumline.train.checkpoints.claim import claim_records
from drumline.train.checkpoints.fence import Fence, newest
from drumline.train.checkpoints.files import COMMITTED, children, disable_listing_cache
from drumline.train.checkpoints.marks import Marks
from drumline.train.checkpoints.provenance import compare, provenance
from drumline.train.mistakes import Mistake
from drumline.train.plan import Plan
from drumline.train.reporting.goodput import Goodput, write_history
from drumline.train.state import State, begin, shardings, steps_taken


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder with checkpoints, and the provenance of those that are added."""

    path: str
    checkpoints: Checkpoints
    provenance: Mapping[str, Any]


def describe_origin(plan: Plan) -> dict[str, Any]:
    """Describe the recipe and the data of a run, for the marks of its checkpoints."""
    return provenance(plan.recipe, plan.mesh, plan.places, plan.loss.traced)


def refuse_other_recipe(folder: str, origin: Mapping[str, Any], allow_changes: bool) -> None:
    """Raise Mistake if another run may be using a folder, and has another recipe.

    This only reads, because a run that will be refused must not take the folder over. In a folder
    that nobody uses, `Saving.check` refuses it, with more detail.
    """
    disable_listing_cache(folder)
    refused, step = "", 0
    if jax.process_index() == 0 and not allow_changes:
        with suppress(OSError, ImportError, RuntimeError, Mistake):
            refused, step = _recipe_in_use(folder, origin)
    if hosts_without(not refused):
        raise _other_recipe(folder, step, refused or "as host 0 sees it")


def _recipe_in_use(folder: str, origin: Mapping[str, Any]) -> tuple[str, int]:
    """Compare a recipe with that of the run that holds a folder: the difference, and its step."""
    holder = newest(claim_records(folder))
    if holder is None or holder.released:
        return "", 0
    path, marks = epath.Path(folder), Marks(folder)
    present = marks.names().intersection(child.name for child in children(path))
    complete = [name for name in present if (path / name / COMMITTED).exists()]
    name = max(complete, key=float, default="")
    before = marks.read(name) if name else None
    refused = compare(before, origin, allow_changes=False).refused if before else ""
    return refused, int(name.partition(".")[0] or 0)


def _other_recipe(folder: str, step: int, reason: str) -> Mistake:
    return Mistake(
        f"checkpoint: step {step:,} in {folder} comes from another recipe ({reason}), and going on "
        "would give the result of neither; change it back, name another folder, or allow it with "
        "--allow-changes or fit(…, allow_changes=True)"
    )


def open_checkpoints(
    plan: Plan,
    folder: str,
    origin: Mapping[str, Any],
    say: Callable[[str], None],
    fence: Fence | None,
) -> CheckpointFolder:
    """Open a folder that has been claimed. On a full disk this makes room first."""
    settings = plan.recipe.settings
    keep = partial(kept, last=settings.keep_last, every=settings.keep_every)
    checkpoints = Checkpoints(folder, keep, say, fence, plan.recipe.steps)
    return CheckpointFolder(folder, checkpoints, origin)


class Saving:
    """The checkpoints of one attempt. Without a folder a run begins anew, and leaves nothing."""

    def __init__(self, plan: Plan, folder: CheckpointFolder | None, goodput: Goodput) -> None:
        """Nothing is read before `restore`."""
        self._plan, self._folder, self._goodput = plan, folder, goodput
        self._saved = 0
        """The step whose very state is in a checkpoint."""

    @property
    def committed(self) -> int | None:
        """The newest checkpoint that is whole, as far as this host knows."""
        return self._folder.checkpoints.committed if self._folder else None

    def restore(self) -> Saved:
        """The newest checkpoint, or the first state."""
        plan, found = self._plan, None
        if self._folder:
            batch = plan.recipe.data.batch
            found = self._folder.checkpoints.restore(plan.places, plan.mesh, batch)
        if found is None:
            found = self._first()
        self._saved = steps_taken(found.state)
        return found

    def nearest(self, to: int) -> int:
        """The step from which one could come once more to this one."""
        return self._folder.checkpoints.newest(to) if self._folder else 0

    def at(self, step: int) -> Saved | None:
        """The checkpoint of a step, or the first state; None where it cannot be read."""
        if not step or self._folder is None:
            return self._first()
        plan = self._plan
        return self._folder.checkpoints.read(step, plan.places, plan.mesh, plan.recipe.data.batch)

    def condemn(self, why: str, *, wait: bool) -> list[int]:
        """Let nobody go on from what this attempt saved and could not check."""
        return self._folder.checkpoints.condemn(why, wait=wait) if self._folder else []

    def check(self, found: Saved, allow_changes: bool) -> tuple[str, ...]:
        """Refuse what another recipe led to; returns what there is to say about the difference."""
        if self._folder is None:
            return ()
        compared = compare(found.provenance, self._folder.provenance, allow_changes)
        # Data that differ on one host alone end the run on all.
        refusing = hosts_without(not compared.refused)
        if refusing:
            why = compared.refused or f"as host {refusing[0]} sees it"
            raise _other_recipe(self._folder.path, self._saved, why)
        return compared.said

    def is_due(self, step: int) -> bool:
        """Whether there is a folder, and this very state is not in it."""
        return self._folder is not None and step != self._saved

    def save(self, step: int, state: State, taken: int, *, checked: bool) -> None:
        """Begin a checkpoint, unless this very state is in one."""
        if self._folder is None or not self.is_due(step):
            return
        history = self._goodput.at_checkpoint(step)
        saved = Saved(state, taken, self._folder.provenance, checked)
        remember = partial(write_history, self._folder.path, history)
        on_commit = remember if jax.process_index() == 0 else lambda: None
        self._folder.checkpoints.save(step, saved, self._plan.mesh, on_commit)
        self._saved = step
        self._goodput.clock.go_on()

    def close(self) -> None:
        """Wait until all that was saved is safe."""
        if self._folder:
            self._folder.checkpoints.close()

    def finish_after_failure(self, kind: type[BaseException] | None, *_: object) -> None:
        """When something breaks, a checkpoint that is being written is still worth having."""
        # With several hosts one must not wait for others that will never come.
        if kind is not None and self._folder and jax.process_count() == 1:
            with suppress(Exception):
                self._folder.checkpoints.wait()

    def _first(self) -> Saved:
        places = shardings(self._plan.places)
        return Saved(jax.jit(partial(begin, self._plan.recipe), out_shardings=places)(), 0)
