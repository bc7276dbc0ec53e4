"""The reconcile loop: observe → decide → save → act.

Each zone is polled with two list calls, however many jobs there are; each host is heard through
its open connection. A poll that fails changes nothing but the age of what is known. Everything
slow runs in tasks of its own, one per slice and purpose, and wakes the loop when done.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from drumline.clock import SteadyClock
from drumline.cloud.protocol import Cloud
from drumline.jobs.config import Config
from drumline.jobs.controller.actions import Actions, Budget
from drumline.jobs.controller.heartbeats import Heartbeats
from drumline.jobs.controller.host_history import Hearing, HostMemory, Witness
from drumline.jobs.controller.polling import ZonePolls
from drumline.jobs.controller.program import detailed_events, make_safe
from drumline.jobs.controller.sessions import Driving, Sessions
from drumline.jobs.controller.slices import Owners, Releases, Requests, Strays, ZoneWatch
from drumline.jobs.core import lifecycle
from drumline.jobs.core.availability import Availability, Zones
from drumline.jobs.core.causes import failing
from drumline.jobs.core.state import (
    Choice,
    Decision,
    Effect,
    EffectKind,
    Job,
    Outcome,
    Placement,
    PlacementPhase,
    Seen,
)
from drumline.jobs.folders import Folders
from drumline.jobs.store.pruning import prune_code, prune_rows, remove_drafts
from drumline.jobs.store.records import Record, Store, Unreadable
from drumline.jobs.store.specs import StoredSpec
from drumline.observed import HostReport

log = logging.getLogger(__name__)

FIRST_PRUNE, PRUNE_SECONDS = 60.0, 3600.0
"""Seconds from the start to the first pruning, and between two: growth takes weeks to matter."""
JOBS_PER_BATCH = 100
"""Jobs that are decided on before the event loop may serve callers."""
ROUND_PAUSE = 0.02
"""The least seconds between two rounds, so that a burst of news is one round and not many."""


Standing = tuple[Job, Zones, bool, bool]


class Supervisor:
    """Keeps every job moving until it is closed."""

    def __init__(
        self,
        store: Store,
        cloud: Cloud,
        config: Config,
        public_key: str,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        witness: Witness | None = None,
    ) -> None:
        """Take up every job as the store has it.

        Order and duration come from the `monotonic` clock; `wall` gives the times that are shown.
        What the `witness` says of hosts is held against them.
        """
        clock = SteadyClock(wall, monotonic)
        self.store = store
        self.config = config
        self.folders = Folders(config.home)
        self.records: dict[str, Record] = {
            r.job.id: replace(r, job=lifecycle.clamped(r.job, clock())) for r in store.living()
        }
        """Jobs that have not ended or hold a slice; the others are in the store alone."""
        living = {job_id for job_id, r in self.records.items() if not r.job.status.ended}
        self.folders.forget_other_secrets(living)
        remove_drafts(self.folders.code)
        self.cloud = cloud
        self.polls = ZonePolls(cloud, config.look_seconds, clock)
        self.heartbeats = Heartbeats(store, self.folders, clock)
        self.changed = asyncio.Condition()
        self.actions = Actions(clock, self.wake)
        self._clock = clock
        self._wall = wall
        budget = Budget(config.asks_a_minute, clock)
        self._requests = Requests(cloud, store.owner, public_key, budget)
        self._availability = Availability(config.zone_rest_scale, clock)
        self._waiting: dict[str, Standing] = {}
        """What the last decision on each job without a slice was based on."""
        self.memory = HostMemory(store.hosts, wall)
        self.sessions = Sessions(cloud, config, self.folders, self.memory, clock)
        self._hearing = witness and Hearing(
            witness, self.records, self.sessions.reports, self.memory, clock
        )
        self.driving = Driving(
            self.records, self.sessions, self.polls, self.actions, self.folders, config,
            heard=self._listen_to, wake=self.wake,
        )  # fmt: skip
        self._wake = asyncio.Event()
        self._prune_at = clock() + FIRST_PRUNE
        self.releases = Releases(
            store, cloud, self.polls, self.folders, wall, checkpoints_of=self._checkpoints_of
        )
        self._owners = owners = Owners(self.folders.owners)
        self.strays = Strays(store.owner, owners, store.last_number())
        self.zones = ZoneWatch(
            store, self.polls, self.releases, self.strays,
            zones=config.zones, held=self._held, clock=clock,
        )  # fmt: skip
        # No job number is used twice in a home, not even by a new database or an older copy: logs
        # are kept by number, and a host that knows a job's attempt takes it for started.
        store.skip_to(max(owners.last_jobs.values(), default=0))
        # Nor is a fencing number, or a folder would refuse the attempts of an older copy.
        store.skip_fence_to(owners.last_fence)
        owners.remember(store.owner, store.last_number(), store.zones_used())

    # --- the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Go on until cancelled. What goes wrong with one step or job does not touch the others."""
        await make_safe(self.records, self.folders.code, self.change)
        while True:
            self._wake.clear()
            began, attempt = self._clock(), self.actions.attempt
            if self.actions.unwritable:
                attempt("writing", self._try_to_write)
            attempt("reading what is to go", partial(self.releases.begin_round, began))
            attempt("polling zones", partial(self.zones.start_polls, self.actions))
            attempt("releasing slices", self._release_slices)
            attempt("pruning", self._prune)
            if self._hearing:
                attempt("hearing", partial(self._hearing.ask_if_due, self.actions))
            attempt("writing what programs told", self.heartbeats.write)
            self._availability.begin_round(record.job for record in self.records.values())
            for number, job_id in enumerate(list(self.records)):
                attempt(f"deciding {job_id}", partial(self._settle, job_id), job_id)
                if number % JOBS_PER_BATCH == JOBS_PER_BATCH - 1:
                    await asyncio.sleep(0)
            async with self.changed:
                self.changed.notify_all()
            await self._wait(began)

    def _try_to_write(self) -> None:
        self.store.check_writable()
        self.memory.write()
        self.actions.writable_again()

    async def _wait(self, began: float) -> None:
        """Wait until there is news or something is due, after a round that began at that time."""
        await asyncio.sleep(ROUND_PAUSE)
        waits = (self.polls.next_due(), self.actions.next_try())
        planned = max(0.01, min(wait for wait in waits if wait is not None))
        # Not wait_for, which in Python 3.11 swallows a cancellation that comes with the news.
        try:
            async with asyncio.timeout(planned):
                await self._wake.wait()
        except TimeoutError:
            pass
        overslept = self._clock() - began - planned
        if overslept > self.config.patience.silence / 4:
            # We could not listen: the machine slept, or was too busy. No host was silent meanwhile.
            log.info("nothing was heard for %.0f s, by no fault of the hosts", overslept)
            self.sessions.listen_again()

    async def close(self) -> None:
        """Close everything; programs and slices go on without us."""
        await self.actions.close()
        await self.sessions.close()
        await self.cloud.close()
        self.heartbeats.write(everything=True)

    def busy(self) -> bool:
        """Whether anything needs us: a job that has not ended, a slice held or to be deleted."""
        living = (not r.job.status.ended or r.job.placement for r in self.records.values())
        return any(living) or bool(self.store.releasing())

    def wake(self) -> None:
        """Start the next round now, because something changed."""
        self._wake.set()

    def _prune(self) -> None:
        """Prune the store now and then; not at the start, which should be quick."""
        now = self._clock()
        if now < self._prune_at:
            return
        self._prune_at = now + PRUNE_SECONDS
        archives = [record.spec.archive for record in self.records.values()]
        prune_code(self.folders.code, {packed.sha for packed in archives if packed}, self._wall())
        self.actions.start("prune", partial(prune_rows, self.store, self._wall()))
        self.memory.prune()

    # --- observe ----------------------------------------------------------------------------

    def _held(self) -> Iterator[Placement]:
        for record in self.records.values():
            if record.job.placement is not None:
                yield record.job.placement
            yield from record.job.parked

    def _seen(self, job: Job, reports: tuple[HostReport, ...]) -> Seen:
        waits = job.placement is None or job.placement.phase is not PlacementPhase.READY
        return Seen(
            sighting=self.polls.of(job.placement) if job.placement else None,
            hosts=reports,
            listening_since=self.sessions.listening_since(job),
            zones=self._availability.zones(job.choices) if waits else {},
            old_slice_alive=job.placement is None and self._old_slice_may_run(job),
            stopped=self.sessions.stopped(job),
            steps=self.heartbeats.steps(job.id, job.attempt.number) if job.attempt else None,
            mass_event=self.memory.mass_event() if any(map(failing, reports)) else "",
        )

    def _standing(self, job: Job) -> Standing | None:
        """All that `decide` depends on for a job without a slice; None for the others.

        If it is equal to that of the last decision there is nothing to decide, which holds for
        most of a thousand waiting jobs in every round.
        """
        if job.placement is not None:
            return None
        return (
            job,
            self._availability.zones(job.choices),
            self._old_slice_may_run(job),
            self._clock() >= job.not_before,
        )

    def _old_slice_may_run(self, job: Job) -> bool:
        """Return True if an earlier program may still write to the job's checkpoints."""
        folder = self.records[job.id].spec.checkpoints_of(job.id)
        return self.releases.may_still_run(job.id, folder)

    def _checkpoints_of(self, job_id: str) -> str | None:
        """The checkpoint folder of a job; None if it has none, or if the job is not known."""
        try:
            record = self.record(job_id) if job_id.isdigit() else None
        except Unreadable:
            return None
        return record.spec.checkpoints_of(job_id) if record else None

    def _listen_to(self, job: Job, reports: tuple[HostReport, ...]) -> None:
        """Take in the metrics that the program reports."""
        if job.attempt is not None and reports:
            pattern = self.records[job.id].spec.progress
            self.heartbeats.listen(job.id, job.attempt.number, reports, pattern)

    def kept_for(self, job: Job) -> float | None:
        """Seconds until the slice that a cancelled job keeps is released; None if it has none."""
        if job.placement is None or job.kept_until is None or not job.status.ended:
            return None
        return max(0.0, job.kept_until - self._clock())

    # --- decide -----------------------------------------------------------------------------

    def _settle(self, job_id: str) -> None:
        record = self.records.get(job_id)
        if record is None:
            return  # it was deleted while others were decided on
        job = record.job
        standing = self._standing(job)
        if standing is not None and standing == self._waiting.get(job_id):
            return
        reports = self.sessions.reports(job)
        self._listen_to(job, reports)
        seen = self._seen(job, reports)
        decision = lifecycle.decide(job, seen, self._clock(), self.config.patience)
        asked = decision.job.placement
        if asked is not None and asked.phase is PlacementPhase.ASKING and job.placement is None:
            self._availability.requested(Choice(asked.accelerator, asked.zone))
        self.apply(job, decision)
        if standing is not None and job_id in self.records:
            self._waiting[job_id] = standing

    def record(self, job_id: str) -> Record | None:
        """The current record of a job, ended or not; None where no job has that id."""
        return self.records.get(job_id) or self.store.record(job_id)

    def take_in(self, record: Record) -> None:
        """Supervise a new job from now on."""
        self.records[record.job.id] = record
        self.strays.gave(record.job.id)
        self.wake()

    def forget(self, job_id: str) -> None:
        """Drop a job that stays as it is until a user acts; the store keeps its record."""
        self.records.pop(job_id, None)
        self._waiting.pop(job_id, None)
        self.actions.forget(job_id)
        self.heartbeats.forget(job_id)

    def change(
        self,
        job_id: str,
        decided: Callable[[Record], Decision | None],
        spec: StoredSpec | None = None,
    ) -> Record | None:
        """Change a job; the only way to do so. `decided` is given its current record.

        Nothing is awaited between reading and writing, so do slow work before, and let `decided`
        check again what it relies on. If it returns None the job stays as it is; a `spec` is
        saved along with its decision. Returns the record afterwards, None where there is no such
        job.
        """
        record = self.record(job_id)
        if record is None:
            return None
        decision = decided(record)
        if decision is not None:
            self.records[job_id] = record
            self.apply(record.job, decision, spec)
        return self.record(job_id)

    def apply(self, before: Job, decision: Decision, spec: StoredSpec | None = None) -> None:
        """Save a decision, then do what follows from it."""
        job = decision.job
        if job.status.ended and not before.status.ended:
            job = replace(job, ended_at=self._wall())
        attempt = job.attempt
        if attempt is not None and not attempt.fence:
            fence = self.store.next_fence()
            self._owners.remember(self.store.owner, fence=fence)
            job = replace(job, attempt=replace(attempt, fence=fence))
        decision = replace(decision, job=job)
        record = self.records[job.id]
        changed = job is not before and job != before
        # Why a job waits is only shown. A thousand jobs that wait for a zone change it together,
        # and after a crash the first round sets it again: no reason for a thousand writes.
        only_told = changed and replace(before, reason=job.reason) == job
        if (changed and not only_told) or decision.events or decision.ended or spec is not None:
            events = detailed_events(decision.events, job, record.spec)
            detailed = replace(decision, events=events)
            self.store.save(detailed, self._wall(), self.sessions.reports(before), spec)
            self.wake()
        if changed or spec is not None:
            given = record.spec if spec is None else spec
            name = given.name or record.name
            self.records[job.id] = replace(record, job=job, spec=given, name=name)
        self._remember(before, decision)
        if _left_its_slice(before, job):
            self._end_session(job.id, before.attempt.number if before.attempt else 0)
        for ended in decision.ended:
            self._end_session(job.id, ended.attempt.number)
            self.heartbeats.end(job.id, ended.attempt.number)
        if job.status.ended and not before.status.ended:
            self.folders.forget_secrets(job.id)
        if (
            job.placement
            and job.placement.phase is PlacementPhase.READY
            and before.placement != job.placement
        ):
            self._availability.filled(Choice(job.placement.accelerator, job.placement.zone))
        for effect in decision.effects:
            self._act(job, effect)
        if job.status.ended and job.placement is None:
            self.forget(job.id)

    def _remember(self, before: Job, decision: Decision) -> None:
        """Hold against a host what it did, and in its favour what it passed."""
        held, after = before.placement, decision.job.placement
        if held is None:
            return
        reports = self.sessions.reports(before)
        told = {report.index: report.identity for report in reports}
        for ended in decision.ended:
            cause = ended.cause
            if ended.outcome is Outcome.BAD_HOST and cause is not None and cause.proof:
                who = told.get(cause.host, {})
                self.memory.accuse(cause, who, held, before.id, ended.attempt.number)
        if held.proved or (after is not None and not after.proved):
            return
        for report in reports:
            if report.examined == "pass":
                text = f"passed the burn-in of job {before.id}"
                self.memory.passed(report.index, report.identity, held, before.id, text)

    def _end_session(self, job_id: str, attempt: int) -> None:
        session = self.sessions.end((job_id, attempt))
        if session is not None:
            self.actions.start(f"close {job_id}/{attempt}", session.close)

    # --- act --------------------------------------------------------------------------------

    def _act(self, job: Job, effect: Effect) -> None:
        held = effect.placement
        match effect.kind:
            case EffectKind.ASK:
                key = f"ask {held.name}"
                if self.actions.may_start(key) and self._requests.may_ask():
                    self.actions.start(key, lambda: self._ask(job.id, held), job.id)
            case EffectKind.DRIVE:
                self.driving.go_on(job, held)
            case EffectKind.STOP:
                self.driving.stop_soon(job, held)
            case EffectKind.POLL:
                self.polls.soon(held.zone)
            case EffectKind.SHORT:
                self._availability.short(Choice(held.accelerator, held.zone), effect.why)
            case EffectKind.RELEASE:
                self.polls.soon(held.zone)

    async def _ask(self, job_id: str, held: Placement) -> None:
        record = self.records.get(job_id)
        if record is None:
            return
        refusal = await self._requests.ask(record, held)
        if refusal is not None:

            def refused(record: Record) -> Decision | None:
                if record.job.placement != held:
                    return None
                now, patience = self._clock(), self.config.patience
                return lifecycle.refused(record.job, refusal, now, patience)

            self.change(job_id, refused)
            return
        self.polls.asked_for(held)

        def asked(record: Record) -> Decision | None:
            return Decision(lifecycle.asked(record.job)) if record.job.placement == held else None

        self.change(job_id, asked)

    def _release_slices(self) -> None:
        asking = self.actions.under_way("ask ")
        for row in self.releases.due(self._clock(), asking):
            self.actions.start(f"release {row.name}", partial(self.releases.release, row))


def _left_its_slice(before: Job, after: Job) -> bool:
    """Whether an attempt goes on without the slice whose hosts it was connected to."""
    if before.placement is None or before.attempt is None or after.attempt is None:
        return False
    same = after.attempt.number == before.attempt.number
    return same and after.placement is None
