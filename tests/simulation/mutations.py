"""Bugs that were mended, put back one by one: a simulation that does not find them is of no use.

python -m tests.simulation.mutations [--seeds 2000] [name …]
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from drumline.hosts import driver
from drumline.jobs.controller import polling, supervisor
from drumline.jobs.controller.actions import Budget
from drumline.jobs.controller.slices import driving, releases, sessions
from drumline.jobs.core import causes, diagnosis, lifecycle, outcomes
from drumline.jobs.core.state import Attempt, Decision, Job, Outcome, PlacementPhase, Sighting, Wish
from drumline.jobs.core.steps import Steps
from drumline.jobs.folders import Folders
from drumline.jobs.server import verbs
from drumline.jobs.store.records import Store
from drumline.jobs.store.specs import StoredSpec
from drumline.train.checkpoints import fence
from tests.simulation.night import simulate
from tests.simulation.runs import count, each, settle
from tests.simulation.schedule import draw

Mutation = Callable[[], AbstractContextManager[Any]]
MOST = 2000
"""Seeds within which each must be found."""


def _never(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def _all_of(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for each in patches:
            stack.enter_context(each)
        yield


def a_release_is_dropped() -> AbstractContextManager[Any]:
    """A slice that is to go is crossed off without being deleted."""

    def due(self: Any, now: float, asking: Any) -> Iterator[Any]:
        del now, asking
        for row in self.rows:
            self._store.gone(row.name, self._wall())
        return iter(())

    return patch.object(releases.Releases, "due", due)


def a_program_starts_beside_the_old_one() -> AbstractContextManager[Any]:
    """The next attempt does not wait until the old slice runs nothing."""
    return patch.object(releases.Releases, "may_still_run", lambda *_: False)


def a_preemption_counts_as_a_failure() -> AbstractContextManager[Any]:
    """A slice that was taken uses up the program's allowance."""
    real = outcomes.preempted

    def taken(job: Job, *rest: Any, **more: Any) -> Decision:
        decision = real(job, *rest, **more)
        blamed = tuple(replace(e, outcome=Outcome.PROGRAM_FAILED) for e in decision.ended)
        return replace(decision, ended=blamed)

    return _all_of(
        patch.object(lifecycle, "preempted", taken),
        patch("drumline.jobs.core.diagnosis.preempted", taken),
    )


def the_wall_clock_orders() -> AbstractContextManager[Any]:
    """Polls and releases are ordered by a clock that steps."""
    return patch.object(
        supervisor,
        "SteadyClock",
        lambda wall, monotonic: wall,  # noqa: ARG005
    )


def one_listing_is_believed() -> AbstractContextManager[Any]:
    """A slice that a listing leaves out counts as gone at once."""
    real = polling.ZonePolls.poll

    async def poll(self: Any, zone: str, expected: Any = ()) -> Any:
        del expected
        return await real(self, zone)

    return patch.object(polling.ZonePolls, "poll", poll)


def a_listing_from_before_the_request_is_believed() -> AbstractContextManager[Any]:
    """A poll that began before a slice was asked for says that it is gone."""

    def of(self: Any, held: Any) -> Any:
        poll = self._newest.get(held.zone)
        return poll and Sighting(poll.at, poll.placements.get(held.name))

    return patch.object(polling.ZonePolls, "of", of)


def a_resume_in_the_grace_is_lost() -> AbstractContextManager[Any]:
    """A job that is resumed while its program is being stopped stays cancelled."""

    def decide(job: Job, *rest: Any) -> Decision:
        if job.wish is Wish.RESTART:
            job = replace(job, wish=Wish.CANCEL)
        return real(job, *rest)

    real = lifecycle.decide
    return patch.object(lifecycle, "decide", decide)


def a_cancel_outranks_a_delete() -> AbstractContextManager[Any]:
    """A cancel after a delete keeps the slice that was to be released."""
    real = verbs.cancel

    def cancel(record: Any) -> Any:
        return real(replace(record, job=replace(record.job, wish=Wish.RUN)))

    return patch.object(verbs, "cancel", cancel)


def a_secret_outlives_its_job() -> AbstractContextManager[Any]:
    """Nobody forgets the secrets."""
    return _all_of(
        patch.object(Folders, "forget_secrets", _never),
        patch.object(Folders, "forget_other_secrets", _never),
    )


def a_request_is_not_written_down() -> AbstractContextManager[Any]:
    """The cloud is asked for a slice that stands in no row."""
    return patch.object(Store, "_write_slice", _never)


def a_kept_slice_is_kept_for_ever() -> AbstractContextManager[Any]:
    """The slice of a cancelled job is never released."""
    real = lifecycle._holding

    def holding(job: Job, held: Any, seen: Any, now: float) -> Decision:
        del now
        return real(replace(job, kept_until=1e12), held, seen, 0.0)

    return patch.object(lifecycle, "_holding", holding)


def a_new_server_starts_the_attempt_anew() -> AbstractContextManager[Any]:
    """After a restart of the server, what runs is taken for an attempt that never began."""

    def clamped(job: Job, now: float) -> Job:
        if job.attempt is None or job.placement is None:
            return job
        if job.placement.phase is not PlacementPhase.READY:
            return job
        number = job.attempts + 1
        return replace(job, attempts=number, attempt=Attempt(number, started_at=now))

    return patch.object(lifecycle, "clamped", clamped)


def requests_have_no_limit() -> AbstractContextManager[Any]:
    """The cloud is asked as often as it likes to refuse."""
    return _all_of(
        patch.object(Budget, "take", lambda _: True),
        patch.object(lifecycle, "backed_off", lambda job, *_: job),
    )


def a_lost_slice_is_not_noticed() -> AbstractContextManager[Any]:
    """What the cloud says of a slice that was taken is not read."""
    return patch("drumline.jobs.core.state.Sighting.why_lost", None)


def a_sleep_is_taken_for_silence() -> AbstractContextManager[Any]:
    """After a sleep of the machine its hosts count as silent."""
    return patch.object(sessions.Sessions, "listen_again", _never)


def decisions_are_made_on_what_was_known_before() -> AbstractContextManager[Any]:
    """A round decides by a job as it was a round ago, and writes over what a user did since."""
    real = supervisor.Supervisor._settle

    def settle(self: Any, job_id: str) -> None:
        before = self.__dict__.setdefault("stale", {})
        now, known = self.records[job_id], before.get(job_id)
        before[job_id] = now
        if known is not None:
            self.records[job_id] = known
        real(self, job_id)

    return patch.object(supervisor.Supervisor, "_settle", settle)


def siblings_of_a_rebooted_host_are_blamed() -> AbstractContextManager[Any]:
    """A host counts as heard before it has said what became of its program."""
    return patch.object(diagnosis, "_spoke_at", lambda report: report.heard)


def steps_of_the_future_count_as_recent() -> AbstractContextManager[Any]:
    """After a clock was set back, a program that hangs has just made a step."""
    return patch.object(Steps, "by", lambda self, _: self)


def a_clock_set_forward_makes_programs_stuck() -> AbstractContextManager[Any]:
    """A new server takes the time in which nobody looked for time without a step."""
    real = diagnosis.stuck

    def stuck(job: Job, held: Any, seen: Any, *rest: Any) -> Decision | None:
        return real(job, held, replace(seen, listening_since=None), *rest)

    return patch.object(lifecycle, "stuck", stuck)


def hosts_are_driven_before_they_are_listed() -> AbstractContextManager[Any]:
    """A new server orders over and over what it cannot do before a poll."""
    return patch.object(driving.Driving, "hosts_known", lambda *_: True)


def a_silent_host_is_never_judged() -> AbstractContextManager[Any]:
    """A host that says no more is waited for, for ever."""
    return patch.object(lifecycle, "silent", _never)


def to_be_let_in_counts_as_an_answer() -> AbstractContextManager[Any]:
    """A host that takes our connections and does nothing else is never silent."""
    real = driver.HostRunner._use_connection

    async def on(self: Any, agent: Any) -> None:
        self._on_answer()
        await real(self, agent)

    return patch.object(driver.HostRunner, "_use_connection", on)


def a_failure_counts_as_a_departure() -> AbstractContextManager[Any]:
    """A program that failed is started again, and nothing is counted."""
    real = causes.find_cause

    def cause(*given: Any) -> Any:
        found = real(*given)
        return replace(found, kind="go on later") if found.kind == "program failed" else found

    return patch.object(diagnosis, "find_cause", cause)


def a_claim_is_not_checked_at_a_save() -> AbstractContextManager[Any]:
    """A writer goes on although another one has claimed the folder."""

    def add(self: Any, **changes: Any) -> None:
        self._claim = replace(self._claim, number=self._claim.number + 1, **changes)
        self._records.create(self._claim.number, self._claim.as_json())

    return _all_of(
        patch.object(fence.Fence, "_add", add), patch.object(fence.Fence, "check", _never)
    )


def the_fencing_number_does_not_grow() -> AbstractContextManager[Any]:
    """Every attempt has the same, so one that starts late may take the folder back."""
    return patch.object(Store, "next_fence", lambda _: 1)


def folders_do_not_carry_their_owner() -> AbstractContextManager[Any]:
    """Two homes with one `checkpoint` use the same folder for jobs of the same number."""
    real = StoredSpec.checkpoints_of

    def checkpoints_of(self: StoredSpec, job_id: str) -> str | None:
        return real(replace(self, checkpoint_owner=None), job_id)

    return patch.object(StoredSpec, "checkpoints_of", checkpoints_of)


def names_that_an_old_writer_uses_are_used_again() -> AbstractContextManager[Any]:
    """A new writer writes where the one before may still write."""
    return patch.object(fence.Fence, "abandoned", ())


MUTATIONS: tuple[Mutation, ...] = (
    a_release_is_dropped,
    a_program_starts_beside_the_old_one,
    a_preemption_counts_as_a_failure,
    the_wall_clock_orders,
    one_listing_is_believed,
    a_listing_from_before_the_request_is_believed,
    a_resume_in_the_grace_is_lost,
    a_cancel_outranks_a_delete,
    a_secret_outlives_its_job,
    a_request_is_not_written_down,
    a_kept_slice_is_kept_for_ever,
    a_new_server_starts_the_attempt_anew,
    requests_have_no_limit,
    a_lost_slice_is_not_noticed,
    a_sleep_is_taken_for_silence,
    decisions_are_made_on_what_was_known_before,
    siblings_of_a_rebooted_host_are_blamed,
    steps_of_the_future_count_as_recent,
    a_clock_set_forward_makes_programs_stuck,
    hosts_are_driven_before_they_are_listed,
    a_silent_host_is_never_judged,
    to_be_let_in_counts_as_an_answer,
    a_failure_counts_as_a_departure,
    a_claim_is_not_checked_at_a_save,
    the_fencing_number_does_not_grow,
    folders_do_not_carry_their_owner,
    names_that_an_old_writer_uses_are_used_again,
)


def seeds_needed(mutation: Mutation, workers: int, most: int = MOST) -> tuple[int, str] | None:
    """The schedule by which it is found, and the promise; None where it is not."""
    with mutation():
        for seed, broken in each(_broken, range(1, most + 1), workers):
            if broken:
                return seed, broken
    return None


def _broken(seed: int) -> str:
    return next(iter(simulate(draw(seed)).broken), "")


def main() -> int:
    """A line for each, and exit code 1 where one was not found."""
    options = argparse.ArgumentParser(prog="python -m tests.simulation.mutations")
    options.add_argument("--workers", type=count, default=os.cpu_count() or 1)
    options.add_argument("--seeds", type=count, default=MOST)
    options.add_argument("names", nargs="*")
    asked = options.parse_args()
    settle()
    known = {mutation.__name__ for mutation in MUTATIONS}
    if unknown := set(asked.names) - known:
        options.error(f"{min(unknown)} is none of {', '.join(sorted(known))}")
    missed = 0
    for mutation in MUTATIONS:
        if asked.names and mutation.__name__ not in asked.names:
            continue
        found = seeds_needed(mutation, asked.workers, asked.seeds)
        missed += found is None
        name = mutation.__name__.replace("_", " ")
        told = f"by seed {found[0]:4}  {found[1]}" if found else f"not found in {asked.seeds} seeds"
        print(f"{name:48} {told}", flush=True)
    print(f"{missed} not found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
