"""The checkpoints of a run: restore the newest at the start of a run, and save new checkpoints."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from etils import epath  # type: ignore[import-untyped]

from drumline.errors import UserError
from drumline.train.checkpoints.checkpoint import (
    Checkpoints,
    Saved,
    read_params,
    root_message,
    steps_to_keep,
)
from drumline.train.checkpoints.claim import claim_records
from drumline.train.checkpoints.fence import Fence, newest
from drumline.train.checkpoints.files import (
    COMMITTED,
    absolute_folder,
    disable_listing_cache,
    list_folder,
    raise_user_errors,
)
from drumline.train.checkpoints.marks import Marks
from drumline.train.checkpoints.provenance import compare_provenance, provenance
from drumline.train.goodput import Goodput, write_history
from drumline.train.multihost import failed_hosts
from drumline.train.plan import Plan
from drumline.train.state import (
    State,
    initial_state,
    pretrained_params,
    shardings,
    step_number,
)


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder of checkpoints, and the provenance of new ones."""

    path: str
    checkpoints: Checkpoints
    provenance: Mapping[str, Any]


def make_provenance(plan: Plan) -> dict[str, Any]:
    """Return the provenance of a run, for the marks of its checkpoints."""
    return provenance(plan.recipe, plan.mesh, plan.abstract_state, plan.loss.jaxpr)


def refuse_folder_in_use(folder: str, current: Mapping[str, Any], allow_changes: bool) -> None:
    """Raise UserError if another run may be using a folder, and has another recipe.

    This only reads, because a run that will be refused must not take the folder over. In a folder
    that is not in use, `compare_recipe` refuses the recipe with more detail.
    """
    disable_listing_cache(folder)
    changes, step = "", 0
    if jax.process_index() == 0 and not allow_changes:
        with suppress(OSError, ImportError, RuntimeError, UserError):
            changes, step = _compare_with_holder(folder, current)
    if failed_hosts(not changes):
        raise _other_recipe(folder, step, changes or "as host 0 sees it")


def _compare_with_holder(folder: str, current: Mapping[str, Any]) -> tuple[str, int]:
    """Compare a recipe with that of the run that holds a folder.

    Return the breaking changes and the step of the newest checkpoint.
    """
    holder = newest(claim_records(folder))
    if holder is None or holder.released:
        return "", 0
    name = max(_complete_names(folder), key=float, default="")
    saved = Marks(folder).read(name) if name else None
    comparison = compare_provenance(saved, current, allow_changes=False) if saved else None
    return comparison.breaking if comparison else "", int(name.partition(".")[0] or 0)


def _complete_names(folder: str) -> list[str]:
    """Return the names of the complete checkpoints that Drumline wrote."""
    path = epath.Path(folder)
    names = Marks(folder).names().intersection(child.name for child in list_folder(path))
    return [name for name in names if (path / name / COMMITTED).exists()]


def load_params(folder: str | Path, *, step: int | None = None, like: Any = None) -> Any:
    """Return the parameters of a checkpoint, for inference. Neither recipe nor mesh is needed.

    Only the parameters are read, on this host, and compared with their checksums. They are NumPy
    arrays in nested dicts.

    Args:
        folder: a folder of checkpoints, on a disk or `gs://…`. A run may be writing to it.
        step: the step of the checkpoint; None is the newest.
        like: a tree of shapes with the structure of the result, such as
            `jax.eval_shape(model.init, jax.random.key(0))`, for parameters that are not nested
            dicts. Shapes with a sharding become JAX arrays with this sharding.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or it does not fit `like`.
    """
    folder = absolute_folder(folder)
    disable_listing_cache(folder)
    with raise_user_errors(folder):
        holder = newest(claim_records(folder))
        unusable = Marks(folder).names_with("suspect").union(holder.abandoned if holder else ())
        names = sorted({*_complete_names(folder)} - unusable, key=float)
    by_step = {int(name.partition(".")[0]): name for name in names}
    if not by_step:
        raise UserError(f"checkpoint: there is no complete checkpoint in {folder}")
    step = max(by_step) if step is None else step
    if step not in by_step:
        steps = ", ".join(map(str, by_step))
        raise UserError(f"checkpoint: there is none of step {step} in {folder}; there are {steps}")
    try:
        return read_params(epath.Path(folder) / by_step[step], like)
    except UserError as error:
        reason = f"does not fit: {error}"
    except Exception as error:
        reason = f"is damaged ({root_message(error)})"
    raise UserError(f"checkpoint: step {step} in {folder} {reason}")


def _other_recipe(folder: str, step: int, changes: str) -> UserError:
    return UserError(
        f"checkpoint: step {step:,} in {folder} comes from another recipe ({changes}), and "
        "resuming would give the result of neither; change it back, name another folder, or allow "
        "it with --allow-changes or fit(…, allow_changes=True)"
    )


def open_checkpoints(
    plan: Plan,
    folder: str,
    current: Mapping[str, Any],
    log: Callable[[str], None],
    fence: Fence | None,
) -> CheckpointFolder:
    """Open a folder that this run has claimed. On a full disk this frees space first."""
    settings = plan.recipe.settings
    keep = partial(steps_to_keep, last=settings.keep_last, every=settings.keep_every)
    checkpoints = Checkpoints(folder, keep, log, fence, plan.recipe.steps)
    return CheckpointFolder(folder, checkpoints, current)


class RunCheckpoints:
    """The checkpoints of an attempt. Without a folder it starts from scratch and does not save."""

    def __init__(self, plan: Plan, folder: CheckpointFolder | None, goodput: Goodput) -> None:
        """`restore` reads the first checkpoint."""
        self._plan, self._folder, self._goodput = plan, folder, goodput
        self._saved_step = 0
        """The step of the last state that was restored or saved."""

    @property
    def committed(self) -> int | None:
        """The step of the newest complete checkpoint, as far as this host knows."""
        return self._folder.checkpoints.committed if self._folder else None

    def restore(self) -> Saved:
        """Return the newest checkpoint, or the initial state."""
        plan, saved = self._plan, None
        if self._folder:
            batch = plan.recipe.data.batch
            saved = self._folder.checkpoints.restore(plan.abstract_state, plan.mesh, batch)
        if saved is None:
            saved = self._initial()
        self._saved_step = step_number(saved.state)
        return saved

    def newest_until(self, step: int) -> int:
        """Return the newest checkpoint up to a step, or 0 for the initial state."""
        return self._folder.checkpoints.newest_until(step) if self._folder else 0

    def read(self, step: int) -> Saved | None:
        """Return the checkpoint of a step, or None if it cannot be read. 0 is the initial state."""
        if not step or self._folder is None:
            return self._initial()
        plan = self._plan
        return self._folder.checkpoints.read(
            step, plan.abstract_state, plan.mesh, plan.recipe.data.batch
        )

    def mark_suspect(self, reason: str, *, wait: bool) -> list[int]:
        """Mark what this attempt saved and could not verify. Return the steps."""
        return self._folder.checkpoints.mark_suspect(reason, wait=wait) if self._folder else []

    def compare_recipe(self, saved: Saved, allow_changes: bool) -> tuple[str, ...]:
        """Compare the recipe with that of a checkpoint. Return messages about the changes.

        Raises UserError for a breaking change, unless changes are allowed.
        """
        if self._folder is None:
            return ()
        current = self._folder.provenance
        comparison = compare_provenance(saved.provenance, current, allow_changes)
        # A difference that only some hosts see must end the run on all hosts.
        refused_by = failed_hosts(not comparison.breaking)
        if refused_by:
            changes = comparison.breaking or f"as host {refused_by[0]} sees it"
            raise _other_recipe(self._folder.path, self._saved_step, changes)
        return comparison.messages

    def needs_save(self, step: int) -> bool:
        """Return True if there is a folder and the state of this step is not in it."""
        return self._folder is not None and step != self._saved_step

    @property
    def write_seconds(self) -> float:
        """The seconds for which the newest complete checkpoint was written; 0 if there is none."""
        return self._folder.checkpoints.write_seconds if self._folder else 0.0

    def save(self, step: int, state: State, position: int, *, checked: bool) -> float:
        """Start to save a checkpoint, unless this state has been saved.

        Return the seconds that this waited for the previous checkpoint.
        """
        if self._folder is None or not self.needs_save(step):
            return 0.0
        history = self._goodput.add_checkpoint(step)
        saved = Saved(state, position, self._folder.provenance, checked)
        write = partial(write_history, self._folder.path, history)
        on_commit = write if jax.process_index() == 0 else lambda: None
        waited = self._folder.checkpoints.save(step, saved, self._plan.mesh, on_commit)
        self._saved_step = step
        self._goodput.clock.end_pause()
        return waited

    def close(self) -> None:
        """Wait until every checkpoint is complete."""
        if self._folder:
            self._folder.checkpoints.close()

    def finish_after_error(self, kind: type[BaseException] | None, *_: object) -> None:
        """After an exception, wait for the checkpoint in progress."""
        # With several hosts this could wait for a host that is gone.
        if kind is not None and self._folder and jax.process_count() == 1:
            with suppress(Exception):
                self._folder.checkpoints.wait()

    def _initial(self) -> Saved:
        plan = self._plan
        params = pretrained_params(plan.recipe, plan.mesh, plan.abstract_state.params)
        create = jax.jit(
            partial(initial_state, plan.recipe), out_shardings=shardings(plan.abstract_state)
        )
        return Saved(create(params), 0)
