"""Put fixed bugs back, one by one, and check that the simulation finds them.

python -m tests.simulation.mutations [--seeds 2000] [name …]
"""

import argparse
import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from drumline.hosts import driver
from drumline.jobs.controller import polling, sessions, slices, supervisor
from drumline.jobs.controller.tasks import RateLimit
from drumline.jobs.core import (
    causes,
    lifecycle,
    outcomes,
    outputs,
    releases,
    requests,
    running,
    stopping,
)
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Attempt,
    Decision,
    DesiredState,
    Job,
    OldProgram,
    PlacementObservation,
    PlacementRole,
)
from drumline.jobs.core.steps import Steps
from drumline.jobs.folders import Folders
from drumline.jobs.server import verbs
from drumline.jobs.store.records import Store
from drumline.jobs.store.specs import StoredSpec
from drumline.train.checkpoints import fence
from tests.simulation.runs import fix_hash_seed, positive_integer, run_all
from tests.simulation.schedule import generate_schedule
from tests.simulation.simulation import simulate

Mutation = Callable[[], AbstractContextManager[Any]]
MAX_SEEDS = 2000
"""The seeds within which the simulation must find each bug."""


def _never(*_: Any, **__: Any) -> None:
    return None


@contextlib.contextmanager
def _all_of(*patches: AbstractContextManager[Any]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for patched in patches:
            stack.enter_context(patched)
        yield


def releases_are_dropped() -> AbstractContextManager[Any]:
    """Forget slices that are being released, without deleting them."""

    def due(self: Any, now: float, requesting: Any) -> Iterator[Any]:
        del now, requesting
        for row in self.rows:
            self._store.gone(row.name, self._wall())
        return iter(())

    return patch.object(slices.Releases, "due", due)


def a_program_starts_while_the_old_one_runs() -> AbstractContextManager[Any]:
    """Start the next attempt before the old slice is gone."""
    return patch.object(slices.Releases, "may_still_run", lambda *_: False)


def preemptions_count_as_failures() -> AbstractContextManager[Any]:
    """Count a lost slice as a failure of the program."""
    real = outcomes.after_preemption

    def count_failures(job: Job, *rest: Any, **more: Any) -> Decision:
        decision = real(job, *rest, **more)
        ended = tuple(replace(e, reason=EndReason.PROGRAM_FAILED) for e in decision.ended)
        return replace(decision, ended=ended)

    return patch.object(running, "after_preemption", count_failures)


def the_wall_clock_orders_events() -> AbstractContextManager[Any]:
    """Order polls and releases by a clock that jumps."""
    return patch.object(
        supervisor,
        "SteadyClock",
        lambda wall, monotonic: wall,  # noqa: ARG005
    )


def a_gap_in_one_listing_counts_as_gone() -> AbstractContextManager[Any]:
    """Treat a slice that a listing leaves out as gone."""
    real = polling.ZonePolls.poll

    async def poll(self: Any, zone: str, expected: Any = (), operations: Any = None) -> Any:
        del expected, operations
        return await real(self, zone)

    return patch.object(polling.ZonePolls, "poll", poll)


def polls_before_the_request_count() -> AbstractContextManager[Any]:
    """Use a poll that began before the request of a slice."""

    def observation(self: Any, placement: Any) -> Any:
        poll = self._newest.get(placement.zone)
        return poll and PlacementObservation(poll.at, poll.placements.get(placement.name))

    return patch.object(polling.ZonePolls, "observation", observation)


def a_resume_during_the_stop_is_lost() -> AbstractContextManager[Any]:
    """Forget a resume while the program is being stopped."""

    def decide(job: Job, *rest: Any) -> Decision:
        if job.wish is DesiredState.RESTART:
            job = replace(job, wish=DesiredState.CANCEL)
        return real(job, *rest)

    real = lifecycle.decide
    return patch.object(lifecycle, "decide", decide)


def a_cancel_overrides_a_delete() -> AbstractContextManager[Any]:
    """Keep the slice of a deleted job that is then cancelled."""
    real = verbs.cancel

    def cancel(record: Any, **options: Any) -> Any:
        return real(replace(record, job=replace(record.job, wish=DesiredState.RUN)), **options)

    return patch.object(verbs, "cancel", cancel)


def secrets_are_never_deleted() -> AbstractContextManager[Any]:
    """Never delete secrets."""
    return _all_of(
        patch.object(Folders, "forget_secrets", _never),
        patch.object(Folders, "forget_other_secrets", _never),
    )


def requests_are_not_saved() -> AbstractContextManager[Any]:
    """Request slices that are in no row of the database."""
    return patch.object(Store, "_write_slice", _never)


def kept_slices_are_never_released() -> AbstractContextManager[Any]:
    """Keep the slice of a cancelled job without limit."""
    real = stopping.keep_for_resume

    def keep(job: Job, placement: Any, seen: Any, now: float) -> Decision:
        del now
        return real(replace(job, kept_until=1e12), placement, seen, 0.0)

    return patch.object(lifecycle, "keep_for_resume", keep)


def a_new_server_repeats_the_attempt() -> AbstractContextManager[Any]:
    """Begin a new attempt after each restart of the server."""

    def adapt(job: Job, now: float) -> Job:
        if job.attempt is None or job.active is None:
            return job
        number = job.attempts + 1
        return replace(job, attempts=number, attempt=Attempt(number, started_at=now))

    return patch.object(lifecycle, "adapt_times", adapt)


def requests_have_no_limit() -> AbstractContextManager[Any]:
    """Remove the limit and the backoff of requests."""
    return _all_of(
        patch.object(RateLimit, "take", lambda _: True),
        patch("drumline.jobs.core.requests.with_backoff", lambda job, *_: job),
        patch("drumline.jobs.core.requests.retry_pause", lambda *_: 0.0),
    )


def lost_slices_are_not_detected() -> AbstractContextManager[Any]:
    """Ignore that the cloud lists a slice as lost."""
    return patch("drumline.jobs.core.state.PlacementObservation.lost_reason", None)


def sleep_of_the_server_counts_as_silence() -> AbstractContextManager[Any]:
    """Count the sleep of the server's machine as silence of the hosts."""
    return patch.object(sessions.Sessions, "restart_listening", _never)


def decisions_use_stale_records() -> AbstractContextManager[Any]:
    """Decide on the job of the previous round, and overwrite changes of a user."""
    real = supervisor.Supervisor._decide_on

    def decide_on(self: Any, job_id: str) -> None:
        before = self.__dict__.setdefault("stale", {})
        current, stale = self.records[job_id], before.get(job_id)
        before[job_id] = current
        if stale is not None:
            self.records[job_id] = stale
        real(self, job_id)

    return patch.object(supervisor.Supervisor, "_decide_on", decide_on)


def other_hosts_are_blamed_for_a_reboot() -> AbstractContextManager[Any]:
    """Do not wait for the report of a host that was rebooted."""
    return patch.object(running, "_reported_at", lambda _: math.inf)


def steps_in_the_future_count_as_recent() -> AbstractContextManager[Any]:
    """Keep times in the future after the clock was set back."""
    return patch.object(Steps, "clamped", lambda self, _: self)


def a_clock_set_forward_makes_programs_stuck() -> AbstractContextManager[Any]:
    """Count the time in which no server listened as time without a step."""
    real = running._check_steps

    def stuck(job: Job, placement: Any, seen: Any, *rest: Any) -> Decision | None:
        return real(job, placement, replace(seen, listening_since=None), *rest)

    return patch.object(running, "_check_steps", stuck)


def hosts_are_connected_before_they_are_listed() -> AbstractContextManager[Any]:
    """Connect to hosts before a poll has listed them."""
    return patch.object(sessions.AttemptRunner, "hosts_listed", lambda *_: True)


def silent_hosts_are_never_diagnosed() -> AbstractContextManager[Any]:
    """Wait for a silent host without limit."""
    return patch.object(running, "_check_silence", _never)


def a_login_counts_as_a_report() -> AbstractContextManager[Any]:
    """Treat a host that accepts connections as never silent."""
    real = driver.HostRunner._use_connection

    async def on(self: Any, agent: Any) -> None:
        self._on_answer()
        await real(self, agent)

    return patch.object(driver.HostRunner, "_use_connection", on)


def failures_are_not_counted() -> AbstractContextManager[Any]:
    """Restart a failed program without counting the failure."""
    real = causes.find_cause

    def cause(*reports: Any, **more: Any) -> Any:
        result = real(*reports, **more)
        failed = result.kind == EndReason.PROGRAM_FAILED
        return replace(result, kind=EndReason.RESTART_REQUESTED) if failed else result

    return patch.object(running, "find_cause", cause)


def claims_are_not_checked_at_a_save() -> AbstractContextManager[Any]:
    """Let a writer continue after another one has claimed its folder."""

    def add(self: Any, **changes: Any) -> None:
        self._claim = replace(self._claim, number=self._claim.number + 1, **changes)
        self._records.create(self._claim.number, self._claim.as_json())

    return _all_of(
        patch.object(fence.Fence, "_add", add), patch.object(fence.Fence, "check", _never)
    )


def fencing_numbers_do_not_grow() -> AbstractContextManager[Any]:
    """Give every attempt the same fencing number, so that a late one can claim the folder again."""
    return patch.object(Store, "next_fence", lambda _: 1)


def checkpoint_folders_have_no_owner() -> AbstractContextManager[Any]:
    """Use one folder for jobs of the same number of two homes."""
    real = StoredSpec.checkpoints_of

    def checkpoints_of(self: StoredSpec, job_id: str) -> str | None:
        return real(replace(self, checkpoint_owner=None), job_id)

    return patch.object(StoredSpec, "checkpoints_of", checkpoints_of)


def file_names_of_an_old_writer_are_reused() -> AbstractContextManager[Any]:
    """Write to files that the previous writer may still write."""
    return patch.object(fence.Fence, "abandoned", ())


def a_cancel_needs_no_confirmation() -> AbstractContextManager[Any]:
    """Count a program as stopped after one try, also on hosts that did not answer."""

    def stopped(self: Any, job: Job) -> bool:
        return sessions.attempt_key(job) in self._stopped

    return patch.object(sessions.Sessions, "stopped", stopped)


def requests_that_are_not_visible_count_as_preempted() -> AbstractContextManager[Any]:
    """Give a request up that the cloud does not show within its first minute."""
    return patch.object(requests, "_may_appear", lambda *_: False)


def errors_of_create_operations_are_ignored() -> AbstractContextManager[Any]:
    """Never read the operation that creates a slice."""

    async def read_nothing(*_: Any) -> tuple[set[str], set[str], dict[str, Any]]:
        return set(), set(), {}

    return patch.object(polling.ZonePolls, "_read_operations", read_nothing)


def the_last_outputs_are_not_copied() -> AbstractContextManager[Any]:
    """Take any earlier copy of the outputs for one after the end of the program."""
    real = outputs.copy_outputs

    def copy_outputs(job: Job, decision: Decision, observations: Any, *clock: Any) -> Decision:
        copy = observations.outputs
        if copy is not None and job.attempt is not None:
            observations = replace(observations, outputs=replace(copy, began_at=float("inf")))
            job = replace(job, attempt=replace(job.attempt, outputs_since=0.0))
        return real(job, decision, observations, *clock)

    return patch.object(lifecycle, "copy_outputs", copy_outputs)


def slices_boot_without_a_deadline() -> AbstractContextManager[Any]:
    """Wait for ever for a slice that was granted and never becomes READY."""
    real = lifecycle.decide

    def decide(job: Job, observations: Any, now: float, timeouts: Any) -> Decision:
        return real(job, observations, now, replace(timeouts, booting=1e12))

    return patch.object(lifecycle, "decide", decide)


def maintenance_counts_as_a_bad_host() -> AbstractContextManager[Any]:
    """Ignore that the cloud lists a maintenance."""
    return patch("drumline.cloud.google.placements._maintenance", lambda _: "")


def a_deletion_without_end_delays_its_job() -> AbstractContextManager[Any]:
    """Wait without limit for a slice that is being deleted."""
    real = slices.Releases.may_still_run

    def may_still_run(self: Any, *arguments: Any) -> bool:
        self._timeout = 1e12
        return real(self, *arguments)

    return patch.object(slices.Releases, "may_still_run", may_still_run)


def a_deletion_is_not_repeated() -> AbstractContextManager[Any]:
    """Delete each slice once, whether or not it is gone afterwards."""
    real = slices.Releases.due

    def due(self: Any, *arguments: Any) -> Iterator[Any]:
        once = self.__dict__.setdefault("once", set())
        for row in real(self, *arguments):
            if row.name not in once:
                once.add(row.name)
                yield row

    return patch.object(slices.Releases, "due", due)


def a_silent_program_counts_as_ended() -> AbstractContextManager[Any]:
    """Record the program on each released slice as ended."""
    return patch.object(supervisor.Supervisor, "_old_program", lambda *_: OldProgram.ENDED)


def other_requests_are_kept_while_the_program_runs() -> AbstractContextManager[Any]:
    """Never withdraw the requests of a job whose slices run the program."""
    real = releases.release_unneeded

    def release_unneeded(decision: Decision, reports: Any) -> Decision:
        if decision.job.status.ended:
            return real(decision, reports)
        return decision

    return patch.object(lifecycle, "release_unneeded", release_unneeded)


def all_ready_slices_become_active() -> AbstractContextManager[Any]:
    """Make slices active that are ready while others of the job are."""
    real = requests._take_ready_slices

    def take(job: Job, placement: Any, *rest: Any) -> Decision:
        actives = tuple(p for p in job.placements if p.role is PlacementRole.ACTIVE)
        decision = real(job.drop(*actives), placement, *rest)
        restored = replace(decision.job, placements=(*actives, *decision.job.placements))
        return replace(decision, job=restored)

    return patch.object(requests, "_take_ready_slices", take)


def an_attempt_moves_to_another_slice() -> AbstractContextManager[Any]:
    """Continue the attempt of a lost slice on the next one."""
    real = outcomes.after_preemption

    def after_preemption(job: Job, *rest: Any, **more: Any) -> Decision:
        decision = real(job, *rest, **more)
        if decision.job.status.ended or job.attempt is None:
            return decision
        attempt = Attempt(job.attempt.number, job.attempt.started_at)
        return replace(decision, job=replace(decision.job, attempt=attempt), ended=())

    return patch.object(running, "after_preemption", after_preemption)


def a_job_asks_in_every_zone() -> AbstractContextManager[Any]:
    """Ignore `ask`."""
    real = requests._ask

    def ask(decision: Decision, *rest: Any) -> Decision:
        limit = decision.job.ask
        wider = real(replace(decision, job=replace(decision.job, ask=99)), *rest)
        return replace(wider, job=replace(wider.job, ask=limit))

    return patch.object(requests, "_ask", ask)


def a_released_slice_counts_as_never_used() -> AbstractContextManager[Any]:
    """Take each released slice for one that lost a race."""
    return patch.object(supervisor.Supervisor, "_old_program", lambda *_: OldProgram.NEVER)


MUTATIONS: tuple[Mutation, ...] = (
    releases_are_dropped,
    a_program_starts_while_the_old_one_runs,
    preemptions_count_as_failures,
    the_wall_clock_orders_events,
    a_gap_in_one_listing_counts_as_gone,
    polls_before_the_request_count,
    a_resume_during_the_stop_is_lost,
    a_cancel_overrides_a_delete,
    secrets_are_never_deleted,
    requests_are_not_saved,
    kept_slices_are_never_released,
    a_new_server_repeats_the_attempt,
    requests_have_no_limit,
    lost_slices_are_not_detected,
    sleep_of_the_server_counts_as_silence,
    decisions_use_stale_records,
    other_hosts_are_blamed_for_a_reboot,
    steps_in_the_future_count_as_recent,
    a_clock_set_forward_makes_programs_stuck,
    hosts_are_connected_before_they_are_listed,
    silent_hosts_are_never_diagnosed,
    a_login_counts_as_a_report,
    failures_are_not_counted,
    claims_are_not_checked_at_a_save,
    fencing_numbers_do_not_grow,
    checkpoint_folders_have_no_owner,
    file_names_of_an_old_writer_are_reused,
    a_cancel_needs_no_confirmation,
    requests_that_are_not_visible_count_as_preempted,
    errors_of_create_operations_are_ignored,
    slices_boot_without_a_deadline,
    maintenance_counts_as_a_bad_host,
    a_deletion_without_end_delays_its_job,
    a_deletion_is_not_repeated,
    a_silent_program_counts_as_ended,
    the_last_outputs_are_not_copied,
    other_requests_are_kept_while_the_program_runs,
    all_ready_slices_become_active,
    an_attempt_moves_to_another_slice,
    a_job_asks_in_every_zone,
    a_released_slice_counts_as_never_used,
)


def seeds_needed(
    mutation: Mutation, workers: int, max_seeds: int = MAX_SEEDS
) -> tuple[int, str] | None:
    """Return a seed that finds the bug, and the violated invariant, or None."""
    with mutation():
        for seed, violation in run_all(_first_violation, range(1, max_seeds + 1), workers):
            if violation:
                return seed, violation
    return None


def _first_violation(seed: int) -> str:
    return next(iter(simulate(generate_schedule(seed)).violations), "")


def main() -> int:
    """Print a line for each bug. Return exit code 1 if one was not found."""
    options = argparse.ArgumentParser(prog="python -m tests.simulation.mutations")
    options.add_argument("--workers", type=positive_integer, default=os.cpu_count() or 1)
    options.add_argument("--seeds", type=positive_integer, default=MAX_SEEDS)
    options.add_argument("names", nargs="*")
    arguments = options.parse_args()
    fix_hash_seed()
    names = {mutation.__name__ for mutation in MUTATIONS}
    if unknown := set(arguments.names) - names:
        options.error(f"{min(unknown)} is none of {', '.join(sorted(names))}")
    missed_count = 0
    for mutation in MUTATIONS:
        if arguments.names and mutation.__name__ not in arguments.names:
            continue
        result = seeds_needed(mutation, arguments.workers, arguments.seeds)
        missed_count += result is None
        name = mutation.__name__.replace("_", " ")
        text = f"not found in {arguments.seeds} seeds"
        if result is not None:
            text = f"by seed {result[0]:4}  {result[1]}"
        print(f"{name:48} {text}", flush=True)
    print(f"{missed_count} not found")
    return 1 if missed_count else 0


if __name__ == "__main__":
    sys.exit(main())
