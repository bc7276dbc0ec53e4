"""The reconcile loop: observe → decide → save → act.

Each zone is polled with two list calls, however many jobs there are. Each host reports over its
open connection. A failed poll has no effect. Every slow action runs in a background task, one
for each slice and purpose, and wakes the loop when it ends.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from drumline.clock import SteadyClock
from drumline.cloud.protocol import Cloud
from drumline.hosts.protocol import Runner
from drumline.jobs.config import Config
from drumline.jobs.controller.heartbeats import Heartbeats
from drumline.jobs.controller.host_history import HealthMonitor, HealthSource, HostHistory
from drumline.jobs.controller.outputs import JobOutputs
from drumline.jobs.controller.polling import ZonePolls
from drumline.jobs.controller.program import add_event_details, repack_old_archives
from drumline.jobs.controller.sessions import AttemptRunner, Sessions, attempt_key
from drumline.jobs.controller.slices import (
    DatabaseIds,
    OrphanedSlices,
    Releases,
    SliceRequests,
    ZoneWatch,
)
from drumline.jobs.controller.tasks import BackgroundTasks, RateLimit
from drumline.jobs.core import lifecycle, requests
from drumline.jobs.core.availability import Availability, Zones
from drumline.jobs.core.causes import has_failed
from drumline.jobs.core.outcomes import after_internal_error
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    Candidate,
    Decision,
    DesiredState,
    Effect,
    EffectType,
    Job,
    Observations,
    OldProgram,
    Placement,
    PlacementRole,
    Status,
)
from drumline.jobs.core.zone_history import ZoneSummary
from drumline.jobs.folders import Folders
from drumline.jobs.store.pruning import prune_code, prune_rows, remove_drafts
from drumline.jobs.store.records import Record, Store, UnreadableJobError
from drumline.jobs.store.specs import StoredSpec
from drumline.observed import HostPhase, HostReport

log = logging.getLogger(__name__)

FIRST_PRUNE, PRUNE_SECONDS = 60.0, 3600.0
"""Seconds before each pruning. Growth takes weeks to matter."""
JOBS_PER_BATCH = 100
"""Jobs to decide on before the event loop may serve callers."""
ROUND_PAUSE = 0.02
"""The shortest pause between two rounds, so that a burst of changes causes one round."""

DecisionInputs = tuple[Job, Zones, bool, bool]


class Supervisor:
    """Moves every job forward until it is closed."""

    def __init__(
        self,
        store: Store,
        cloud: Cloud,
        config: Config,
        runner: Runner,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        health_source: HealthSource | None = None,
    ) -> None:
        """Take over every job in the store.

        The `monotonic` clock gives order and durations, and `wall` the times for display. Hosts
        that the `health_source` reports become suspect.
        """
        clock = SteadyClock(wall, monotonic)
        self.store = store
        self.config = config
        self.prices = config.prices
        self.folders = Folders(config.home)
        self.records: dict[str, Record] = {
            r.job.id: replace(r, job=lifecycle.adapt_times(r.job, clock())) for r in store.living()
        }
        """Unfinished jobs and jobs that hold slices. Other jobs are only in the store."""
        active = {job_id for job_id, r in self.records.items() if not r.job.status.ended}
        self.folders.forget_other_secrets(active)
        remove_drafts(self.folders.code)
        self.cloud = cloud
        self.polls = ZonePolls(cloud, config.poll_seconds, clock, config.timeouts.visible)
        self.heartbeats = Heartbeats(store, self.folders, clock)
        self.changed = asyncio.Condition()
        self.tasks = BackgroundTasks(clock, on_end=self.wake, give_up=self._end_after_bug)
        self._clock = clock
        self._wall = wall
        limit = RateLimit(config.requests_per_minute, clock)
        self._requests = SliceRequests(cloud, runner, store.owner, limit, config.slice_settings)
        self._availability = Availability(
            config.zone_backoff_scale, clock, store.zone_events(), store.add_zone_event
        )
        self._last_inputs: dict[str, DecisionInputs] = {}
        """The inputs of the last decision on each job without a placement."""
        self.host_history = HostHistory(store.hosts, wall)
        self.sessions = Sessions(
            runner, config, self.folders, self.host_history, clock, self._availability.mean_lifetime
        )
        self._health_monitor = health_source and HealthMonitor(
            health_source, self.records, self.sessions.reports, self.host_history, clock
        )
        self._attempt_runner = AttemptRunner(
            self.records, self.sessions, self.polls, self.tasks, self.folders, config,
            on_reports=self._update_metrics, wake=self.wake,
        )  # fmt: skip
        self.outputs = JobOutputs(
            self.records, self.sessions, self.tasks, self.folders, config, clock=clock, wall=wall
        )
        self._wake = asyncio.Event()
        self._prune_at = clock() + FIRST_PRUNE
        self.releases = Releases(
            store, cloud, runner, self.polls, wall,
            checkpoints_of=self._checkpoints_of, timeout=config.timeouts.deleting,
        )  # fmt: skip
        self._databases = databases = DatabaseIds(self.folders.owners)
        self.orphans = OrphanedSlices(store.owner, databases, store.last_number())
        self.zones = ZoneWatch(
            store, self.polls, self.releases, self.orphans,
            zones=config.zones, placements=self._placements, clock=clock,
        )  # fmt: skip
        # A home never uses a job number twice, even with a new database or an older copy: logs are
        # stored by number, and a host that knows a job's attempt assumes that it has started.
        store.skip_to(max(databases.last_jobs.values(), default=0))
        # The same holds for fencing numbers: a folder would refuse the attempts of an older copy.
        store.skip_fence_to(databases.last_fence)
        databases.update(store.owner, store.last_number(), store.zones_used())

    # --- The loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Run rounds until cancelled. An error in one step or job does not affect the others."""
        await repack_old_archives(self.records, self.folders.code, self.change)
        while True:
            self._wake.clear()
            round_started_at, run_now = self._clock(), self.tasks.run_now
            if self.tasks.disk_error:
                run_now("writing", self._try_to_write)
            run_now("reading releases", partial(self.releases.begin_round, round_started_at))
            run_now("polling zones", partial(self.zones.start_polls, self.tasks))
            run_now("releasing slices", self._release_slices)
            run_now("pruning", self._prune)
            if self._health_monitor:
                run_now("health", partial(self._health_monitor.start_if_due, self.tasks))
            run_now("writing metrics", self.heartbeats.save)
            self._availability.begin_round(record.job for record in self.records.values())
            for index, job_id in enumerate(list(self.records)):
                run_now(f"deciding {job_id}", partial(self._decide_on, job_id), job_id)
                if index % JOBS_PER_BATCH == JOBS_PER_BATCH - 1:
                    await asyncio.sleep(0)
            async with self.changed:
                self.changed.notify_all()
            await self._wait(round_started_at)

    def _try_to_write(self) -> None:
        self.store.check_writable()
        self.host_history.save_unsaved()
        self.tasks.disk_recovered()

    async def _wait(self, round_started_at: float) -> None:
        """Wait after a round until a change arrives or an action is due."""
        await asyncio.sleep(ROUND_PAUSE)
        waits = (self.polls.next_due(), self.tasks.next_retry())
        planned = max(0.01, min(wait for wait in waits if wait is not None))
        # wait_for of Python 3.11 swallows a cancellation that comes at the same time as the event.
        try:
            async with asyncio.timeout(planned):
                await self._wake.wait()
        except TimeoutError:
            pass
        overslept = self._clock() - round_started_at - planned
        if overslept > self.config.timeouts.silence / 4:
            # The machine slept or was too busy to listen, so silence of the hosts is no evidence.
            log.info("this server did not run for %.0f s; host timeouts start again", overslept)
            self.sessions.restart_listening()

    async def close(self) -> None:
        """Close everything. Programs and slices continue without the server."""
        await self.tasks.close()
        await self.sessions.close()
        await self.cloud.close()
        self.heartbeats.save(everything=True)

    def busy(self) -> bool:
        """Return True if a job has not finished, or a slice is held or being deleted."""
        busy = (not r.job.status.ended or r.job.placements for r in self.records.values())
        return any(busy) or bool(self.store.releasing())

    def wake(self) -> None:
        """Start the next round now, because something changed."""
        self._wake.set()

    def _prune(self) -> None:
        """Prune the store now and then, but not at the start, which should be fast."""
        now = self._clock()
        if now < self._prune_at:
            return
        self._prune_at = now + PRUNE_SECONDS
        archives = [record.spec.archive for record in self.records.values()]
        used = {name for packed in archives if packed for name in packed.names}
        prune_code(self.folders.code, used, self._wall())
        self.tasks.start("prune", partial(prune_rows, self.store, self._wall()))
        self.host_history.prune()

    # --- Observe ----------------------------------------------------------------------------

    def _placements(self) -> Iterator[Placement]:
        for record in self.records.values():
            yield from record.job.placements

    def _observe(self, job: Job, reports: tuple[HostReport, ...]) -> Observations:
        waits = job.active is None
        failed = any(map(has_failed, reports))
        observed = {p.name: self.polls.observation(p) for p in job.placements}
        return Observations(
            placements={name: seen for name, seen in observed.items() if seen is not None},
            reports=reports,
            address_error=self.sessions.address_error(job),
            listening_since=self.sessions.listening_since(job),
            zones=self._availability.zones(job.choices) if waits or job.migrates else {},
            old_program_may_run=(waits or job.wish is not DesiredState.RUN)
            and self._old_program_may_run(job),
            deleting=self.releases.zones_of_requests(job.id) if waits else frozenset(),
            stopped=self.sessions.stopped(job),
            unreachable=self.sessions.unreachable(job),
            steps=self.heartbeats.steps(job.id, job.attempt.number) if job.attempt else None,
            outputs=self.outputs.newest_copy(job) if job.outputs else None,
            mass_failure=self.host_history.mass_failure_message() if failed else "",
        )

    def _decision_inputs(self, job: Job) -> DecisionInputs | None:
        """Return everything that `decide` reads for a job without placements; None for others.

        If it equals the inputs of the last decision, no new decision is needed. This holds for
        most of a thousand waiting jobs in every round.
        """
        if job.placements:
            return None
        return (
            job,
            self._availability.zones(job.choices),
            self._old_program_may_run(job),
            self._clock() >= job.not_before,
        )

    def _old_program_may_run(self, job: Job) -> bool:
        """Return True if a program of the job may still run on a slice that is being deleted.

        For a job that shall run, other programs that write to its checkpoints count too.
        """
        runs = job.wish is DesiredState.RUN
        folder = self.records[job.id].spec.checkpoints_of(job.id) if runs else None
        return self.releases.may_still_run(job.id, folder, self._clock())

    def _checkpoints_of(self, job_id: str) -> str | None:
        """Return the checkpoint folder of a job; None if it has none, or is not known."""
        try:
            record = self.record(job_id) if job_id.isdigit() else None
        except UnreadableJobError:
            return None
        return record.spec.checkpoints_of(job_id) if record else None

    def _update_metrics(self, job: Job, reports: tuple[HostReport, ...]) -> None:
        """Take in the metrics that the program reports."""
        if job.attempt is not None and reports:
            pattern = self.records[job.id].spec.progress
            self.heartbeats.update(job.id, job.attempt.number, reports, pattern)

    def zone_summary(self, candidate: Candidate) -> ZoneSummary:
        """Return what this home has seen of a zone and accelerator."""
        return self._availability.summary(candidate)

    def kept_for(self, job: Job) -> float | None:
        """Return the seconds until a cancelled job's slices are released; None without any."""
        if job.active is None or job.kept_until is None or not job.status.ended:
            return None
        return max(0.0, job.kept_until - self._clock())

    # --- Decide -----------------------------------------------------------------------------

    def _decide_on(self, job_id: str) -> None:
        record = self.records.get(job_id)
        if record is None:
            return  # deleted during this round
        job = record.job
        inputs = self._decision_inputs(job)
        same = inputs is not None and inputs == self._last_inputs.get(job_id)
        if same and not job.status.ended:
            return
        reports = self.sessions.reports(job)
        self._update_metrics(job, reports)
        observations = self._observe(job, reports)
        decision = lifecycle.decide(job, observations, self._clock(), self.config.timeouts)
        known = {placement.name for placement in job.placements}
        # A job has at most one request for a candidate, so one that is replaced is counted already.
        counted = {p.candidate for p in job.placements if p.role is PlacementRole.REQUESTED}
        for placement in decision.job.requests:
            if placement.name not in known and placement.candidate not in counted:
                self._availability.record_request(placement.candidate)
        self.apply(job, decision)
        if inputs is not None and job_id in self.records:
            self._last_inputs[job_id] = inputs

    def record(self, job_id: str) -> Record | None:
        """Return the current record of a job, finished or not; None if there is no such job."""
        return self.records.get(job_id) or self.store.record(job_id)

    def add(self, record: Record) -> None:
        """Supervise a new job from now on."""
        self.records[record.job.id] = record
        self.orphans.record_job(record.job.id)
        self.wake()

    def forget(self, job_id: str) -> None:
        """Drop a job that stays as it is until a user acts. The store keeps its record."""
        self.records.pop(job_id, None)
        self._last_inputs.pop(job_id, None)
        self.tasks.forget(job_id)
        self.heartbeats.forget(job_id)
        self.outputs.forget(job_id)

    def change(
        self,
        job_id: str,
        decide: Callable[[Record], Decision | None],
        spec: StoredSpec | None = None,
    ) -> Record | None:
        """Change a job, which is only possible here. Return its record afterwards.

        `decide` gets the current record. If it returns None, the job stays as it is. A `spec` is
        saved together with the decision. There is no await between reading and writing, so do slow
        work before, and let `decide` recheck its assumptions.
        """
        record = self.record(job_id)
        if record is None:
            return None
        decision = decide(record)
        if decision is not None:
            self.records[job_id] = record
            self.apply(record.job, decision, spec)
        return self.record(job_id)

    def _end_after_bug(self, job_id: str, message: str) -> None:
        """End a job whose action always fails because of a bug."""
        self.change(job_id, lambda r: after_internal_error(r.job, message, self._clock()))

    def apply(self, before: Job, decision: Decision, spec: StoredSpec | None = None) -> None:
        """Save a decision, then act on it."""
        job = decision.job
        if job.status.ended and not before.status.ended:
            job = replace(job, ended_at=self._wall())
        attempt = job.attempt
        if attempt is not None and not attempt.fence:
            fence = self.store.next_fence()
            self._databases.update(self.store.owner, fence=fence)
            job = replace(job, attempt=replace(attempt, fence=fence))
        decision = replace(decision, job=job)
        record = self.records[job.id]
        changed = job is not before and job != before
        # The reason why a job waits is only displayed. A thousand jobs that wait for a zone change
        # it together, and the next round after a crash restores it, so it is not saved.
        only_reason = changed and replace(before, reason=job.reason) == job
        if (changed and not only_reason) or decision.events or decision.ended or spec is not None:
            events = add_event_details(decision.events, job, record.spec, self.prices)
            detailed = replace(decision, events=events)
            old_programs = {
                effect.placement.name: self._old_program(before, effect.placement)
                for effect in decision.effects
                if effect.kind is EffectType.RELEASE
            }
            reports = self.sessions.reports(before)
            self.store.save(detailed, self._wall(), reports, spec, old_programs)
            self.wake()
        if changed or spec is not None:
            new_spec = record.spec if spec is None else spec
            name = new_spec.name or record.name
            self.records[job.id] = replace(record, job=job, spec=new_spec, name=name)
        self._update_host_history(before, decision)
        if _lost_its_slices(before, job):
            self._close_session(job.id, before.attempt.number if before.attempt else 0)
        for ended in decision.ended:
            self._close_session(job.id, ended.attempt.number)
            self.heartbeats.end(job.id, ended.attempt.number)
        if job.active and (before.active is None or before.active.name != job.active.name):
            waited = (job.active.ready_at or self._clock()) - job.active.waiting_since
            self._availability.record_grant(job.active.candidate, waited)
        if before.active and any(e.reason is EndReason.PREEMPTED for e in decision.ended):
            lived = self._clock() - (before.active.ready_at or self._clock())
            self._availability.record_loss(before.active.candidate, lived)
        for effect in decision.effects:
            self._act(job, effect)
        if not job.status.ended:
            return
        # If this fails, the next round repeats the decision.
        self.folders.forget_secrets(job.id)
        if not job.placements and not self.heartbeats.has_unsaved(job.id):
            self.forget(job.id)

    def _old_program(self, job: Job, placement: Placement) -> OldProgram:
        """Return what is known of the program on slices that a job releases."""
        attempt, reports = job.attempt, self.sessions.reports(job)
        roles = {known.name: known.role for known in job.placements}
        match roles.get(placement.name):
            case None:
                return OldProgram.UNKNOWN
            case PlacementRole.REQUESTED | PlacementRole.STARTING:
                return OldProgram.NEVER
            case PlacementRole.HELD_BACK:
                return OldProgram.ENDED  # slices are held back only without a program
        if attempt is None:
            # An attempt ends with a confirmed stop. An adopted slice may run another's program.
            return OldProgram.ENDED if job.attempts else OldProgram.UNKNOWN
        exited = all(r.phase in {HostPhase.EXITED, HostPhase.MISSING} for r in reports)
        if self.sessions.stopped(job) or (reports and exited):
            return OldProgram.ENDED
        if attempt.sent_at is None and not self.sessions.was_contacted(placement):
            return OldProgram.ENDED  # no program was ever sent there
        steps = self.heartbeats.steps(job.id, attempt.number)
        # A program that has not claimed its folder yet is refused after the next attempt has.
        fenced = job.fences or (steps is not None and steps.fenced)
        return OldProgram.FENCED if fenced else OldProgram.UNKNOWN

    def _update_host_history(self, before: Job, decision: Decision) -> None:
        """Record evidence against hosts that failed, and the burn-ins that hosts passed."""
        placement, after = before.active, decision.job.active
        if placement is None:
            return
        reports = self.sessions.reports(before)
        identities = {report.index: report.identity for report in reports}
        for ended in decision.ended:
            cause = ended.cause
            if ended.reason is EndReason.BAD_HOST and cause is not None and cause.proof:
                identity = identities.get(cause.host, {})
                self.host_history.record_failure(
                    cause, identity, placement, before.id, ended.attempt.number
                )
        if _works_elsewhere(before, decision.job):
            self.host_history.confirm_failed_starts(before.id)
        if placement.proved or (after is not None and not after.proved):
            return
        for report in reports:
            if report.burn_in == "pass":
                self.host_history.record_pass(report.index, report.identity, placement, before.id)

    def _close_session(self, job_id: str, attempt: int) -> None:
        session = self.sessions.end((job_id, attempt))
        if session is not None:
            self.tasks.start(f"close {job_id}/{attempt}", session.close)

    # --- Act --------------------------------------------------------------------------------

    def _act(self, job: Job, effect: Effect) -> None:
        placement = effect.placement
        match effect.kind:
            case EffectType.REQUEST:
                key = f"ask {placement.name}"
                if self.tasks.may_start(key) and self._requests.take_request():
                    self.tasks.start(key, lambda: self._request(job.id, placement), job.id)
            case EffectType.RUN:
                self._attempt_runner.run(job, placement)
            case EffectType.STOP:
                self._attempt_runner.stop(job, placement)
            case EffectType.COPY_OUTPUTS:
                if self.sessions.get(attempt_key(job)) is None:
                    self._attempt_runner.run(job, placement)
                self.outputs.start_copy(job)
            case EffectType.NO_CAPACITY:
                waited = self._clock() - placement.waiting_since
                self._availability.record_shortage(
                    placement.candidate, effect.reason, effect.words, effect.fault, waited
                )
            case EffectType.POLL | EffectType.RELEASE:
                if not placement.queued:  # a request without slices costs nothing
                    self.polls.poll_soon(placement.zone)

    async def _request(self, job_id: str, placement: Placement) -> None:
        record = self.records.get(job_id)
        if record is None:
            return
        result = await self._requests.request(record, placement)
        if isinstance(result, str):
            self.polls.request_accepted(placement)

        def decide(record: Record) -> Decision | None:
            now, timeouts = self._clock(), self.config.timeouts
            if isinstance(result, str):
                return Decision(requests.request_accepted(record.job, placement.name, now, result))
            return requests.request_refused(record.job, placement.name, result, now, timeouts)

        self.change(job_id, decide)

    def _release_slices(self) -> None:
        requesting = self.tasks.keys_in_progress("ask ")
        for row in self.releases.due(self._clock(), requesting):
            self.tasks.start(f"release {row.name}", partial(self.releases.release, row))


def _works_elsewhere(before: Job, after: Job) -> bool:
    """Return True if a job has just made progress, or succeeded, after it left a bad host."""
    if not before.bad_hosts:
        return False
    if after.status is Status.SUCCEEDED and not before.status.ended:
        return True
    same_attempt = (
        before.attempt and after.attempt and before.attempt.number == after.attempt.number
    )
    return bool(same_attempt) and after.bad_in_a_row < before.bad_in_a_row


def _lost_its_slices(before: Job, after: Job) -> bool:
    """Return True if the attempt continues, but no longer on these slices."""
    if before.active is None or before.attempt is None or after.attempt is None:
        return False
    same_attempt = after.attempt.number == before.attempt.number
    return same_attempt and (after.active is None or after.active.name != before.active.name)
