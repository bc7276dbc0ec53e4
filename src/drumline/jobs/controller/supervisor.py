"""The loop: observe → decide → write down → act.

Each zone is looked at once a tick with two list calls, however many jobs there are; each host is
heard through its open connection. A look that fails changes nothing but the age of what is known.
Everything slow runs in tasks of its own, one per slice and purpose, and wakes the loop when done.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from drumline.chips import slice_of
from drumline.clock import SteadyClock
from drumline.cloud.protocol import Cloud, CloudError, Node, SliceRequest
from drumline.hosts.values import Address, HostPhase, HostReport
from drumline.jobs.config import Config
from drumline.jobs.controller.actions import Actions, Budget
from drumline.jobs.controller.heartbeats import Pulses
from drumline.jobs.controller.log_limit import trim
from drumline.jobs.controller.polling import Looks
from drumline.jobs.controller.program import program_of, told_events
from drumline.jobs.controller.releases import LABEL_JOB, LABEL_OWNER, Releases
from drumline.jobs.controller.strays import Owners, Strays
from drumline.jobs.core import lifecycle
from drumline.jobs.core.state import (
    Choice,
    Decision,
    Effect,
    EffectKind,
    Job,
    Seen,
    Slice,
    SlicePhase,
    Zone,
)
from drumline.jobs.core.zone_backoff import ZoneBook
from drumline.jobs.folders import Folders
from drumline.jobs.store.pruning import prune_code, prune_rows, remove_drafts
from drumline.jobs.store.records import Record, Store

if TYPE_CHECKING:
    from drumline.hosts.session import SliceSession

log = logging.getLogger(__name__)

SWEEP_SECONDS = 300.0
"""Between two looks at zones where nothing of ours should be; a forgotten slice costs money."""
FIRST_PRUNE, PRUNE_SECONDS = 60.0, 3600.0
"""After the start, and between two times: what grows takes weeks to matter."""
BREATH = 100
"""Jobs that are decided on at a stretch; then callers have their turn."""
ROUND_PAUSE = 0.02
"""Seconds between two rounds at least, so that a burst of news is one round and not many."""


Standing = tuple[Job, Mapping[Choice, Zone], bool, bool]


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
    ) -> None:
        """Take up every job where the store left it.

        Order and duration come from the `monotonic` clock; the `wall` is for showing.
        """
        clock = SteadyClock(wall, monotonic)
        self.store = store
        self.config = config
        self.folders = Folders(config.home)
        self.records: dict[str, Record] = {
            r.job.id: replace(r, job=lifecycle.drawn_back(r.job, clock())) for r in store.living()
        }
        """Jobs that have not ended or hold a slice; the others are in the store alone."""
        living = {job_id for job_id, r in self.records.items() if not r.job.status.ended}
        self.folders.forget_other_secrets(living)
        remove_drafts(self.folders.code)
        self.cloud = cloud
        self.looks = Looks(cloud, config.look_seconds, clock)
        self.pulses = Pulses(store, self.folders, clock)
        self.changed = asyncio.Condition()
        self._public_key = public_key
        self.actions = Actions(clock, self.wake)
        self._clock = clock
        self._wall = wall
        self._owner = store.owner
        self._asks = Budget(config.asks_a_minute, clock)
        self._book = ZoneBook(scale=config.zone_rest_scale)
        self._open_zones: dict[tuple[Choice, ...], dict[Choice, Zone]] = {}
        self._zones_before: dict[tuple[Choice, ...], dict[Choice, Zone]] = {}
        self._waiting: dict[str, Standing] = {}
        """What the last decision on a job without a slice went by."""
        self._sessions: dict[tuple[str, int], SliceSession] = {}
        self._listening_since: dict[tuple[str, int], float] = {}
        self._stopped: set[tuple[str, int]] = set()
        self._wake = asyncio.Event()
        self._swept_at = float("-inf")
        self._prune_at = clock() + FIRST_PRUNE
        self.releases = Releases(store, cloud, self.looks, self.folders, wall)
        owners = Owners(self.folders.owners)
        self.strays = Strays(store.owner, owners, store.last_number())
        # No number is given twice in a home, not even by a new database or an older copy: logs are
        # kept by it, and a host takes the attempt of a job that it knows for one that has begun.
        store.skip_to(max(owners.last_jobs.values(), default=0))
        owners.remember(store.owner, store.last_number(), store.zones_used())

    # --- the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Go on until cancelled. What goes wrong with one step or job does not touch the others."""
        while True:
            self._wake.clear()
            began, attempt = self._clock(), self.actions.attempt
            if self.actions.unwritable:
                attempt("writing", self._try_to_write)
            attempt("reading what is to be released", self._begin_round)
            attempt("looking at zones", self._look_at_zones)
            attempt("releasing slices", self._release_slices)
            attempt("pruning", self._prune)
            attempt("writing what programs told", self.pulses.write)
            pending = self._pending()
            self._open_zones.clear()
            for number, job_id in enumerate(list(self.records)):
                attempt(f"deciding {job_id}", partial(self._settle, job_id, pending), job_id)
                if number % BREATH == BREATH - 1:
                    await asyncio.sleep(0)
            async with self.changed:
                self.changed.notify_all()
            await self._rest(began)

    def _begin_round(self) -> None:
        self.releases.begin_round(self._clock())

    def _try_to_write(self) -> None:
        self.store.check_writable()
        self.actions.writable_again()

    async def _rest(self, began: float) -> None:
        """Until there is news or something is due, after a round that began at that time."""
        await asyncio.sleep(ROUND_PAUSE)
        waits = (self.looks.next_due(), self.actions.next_try())
        planned = max(0.01, min(wait for wait in waits if wait is not None))
        # Not wait_for, which in Python 3.11 swallows a cancellation that comes with the news.
        try:
            async with asyncio.timeout(planned):
                await self._wake.wait()
        except TimeoutError:
            pass
        overslept = self._clock() - began - planned
        if overslept > self.config.patience.silence / 4:
            self._woke_up(overslept)

    def _woke_up(self, overslept: float) -> None:
        """We could not listen: the machine slept, or was too busy. Nobody was silent meanwhile."""
        log.info("nothing was heard for %.0f s, by no fault of the hosts", overslept)
        now = self._clock()
        self._listening_since = dict.fromkeys(self._listening_since, now)

    async def close(self) -> None:
        """Let go of everything; programs and slices go on without us."""
        await self.actions.close()
        await asyncio.gather(*(s.close() for s in self._sessions.values()), return_exceptions=True)
        await self.cloud.close()
        self.pulses.write(everything=True)

    def busy(self) -> bool:
        """Whether anything needs us: a job that lives, a slice that is held or that is to go."""
        living = (not r.job.status.ended or r.job.slice for r in self.records.values())
        return any(living) or bool(self.store.releasing())

    def wake(self) -> None:
        """Something changed: go round now."""
        self._wake.set()

    def _prune(self) -> None:
        """Forget what nobody will miss, now and then; not at the start, which shall be quick."""
        now = self._clock()
        if now < self._prune_at:
            return
        self._prune_at = now + PRUNE_SECONDS
        archives = [r.spec.get("archive") for r in self.records.values()]
        prune_code(self.folders.code, {one["sha"] for one in archives if one}, self._wall())
        self.actions.start("prune", partial(prune_rows, self.store, self._wall()))

    # --- observe ----------------------------------------------------------------------------

    def _zones_of_interest(self) -> set[str]:
        held = {r.job.slice.zone for r in self.records.values() if r.job.slice}
        return held | {row.zone for row in self.releases.rows}

    def _look_at_zones(self) -> None:
        now, zones = self._clock(), self._zones_of_interest()
        if now - self._swept_at > SWEEP_SECONDS:
            zones |= self._all_zones()
            self._swept_at = now
        for zone in self.looks.due(zones):
            self.actions.start(f"look {zone}", partial(self._look, zone))

    def _all_zones(self) -> set[str]:
        """Where a slice of ours may be."""
        return set(self.config.zones) | self.store.zones_used() | self.strays.zones

    async def look_everywhere(self) -> None:
        """Look at every zone where a slice of ours may be, now."""
        await asyncio.gather(*(self._look(zone) for zone in self._all_zones()))

    def known_slices(self) -> set[str]:
        """Slices that a job holds or that are to go."""
        slices = (record.job.slice for record in self.records.values())
        held = {held.name for held in slices if held}
        return held | {row.name for row in self.store.releasing()}

    async def _look(self, zone: str) -> None:
        expected = self._held_in(zone) | {r.name for r in self.releases.rows if r.zone == zone}
        look = await self.looks.look(zone, expected)
        if look is not None:
            self.strays.see(look)
            held = self._held_in(zone) | self.store.held_aside() | self.strays.names()
            self.releases.take_in_strays(look, held)

    def _held_in(self, zone: str) -> set[str]:
        """The names of the slices that jobs hold or wait for in a zone."""
        slices = (record.job.slice for record in self.records.values())
        return {held.name for held in slices if held and held.zone == zone}

    def _seen(self, job: Job, pending: Counter[Choice]) -> Seen:
        waits = job.slice is None or job.slice.phase is not SlicePhase.READY
        return Seen(
            look=self.looks.of(job.slice) if job.slice else None,
            hosts=self.reports(job),
            listening_since=self._listening_since.get((job.id, job.attempt.number))
            if job.attempt
            else None,
            zones=self._zones(job.choices, pending) if waits else {},
            old_slice_alive=job.slice is None and self.releases.may_still_run(job.id),
            stopped=job.attempt is not None and (job.id, job.attempt.number) in self._stopped,
            course=self.pulses.course(job.id, job.attempt.number) if job.attempt else None,
        )

    def _zones(
        self, choices: tuple[Choice, ...], pending: Counter[Choice]
    ) -> Mapping[Choice, Zone]:
        """Where one may ask now; jobs with the same choices share the answer until one asks."""
        found = self._open_zones.get(choices)
        if found is None:
            now = self._clock()
            found = {choice: self._book.zone(choice, pending[choice], now) for choice in choices}
            before = self._zones_before.get(choices)
            # The same object for the same answer, so that comparing two is quick.
            found = before if before is not None and before == found else found
            self._open_zones[choices] = self._zones_before[choices] = found
        return found

    def _standing(self, job: Job, pending: Counter[Choice]) -> Standing | None:
        """All that `decide` goes by for a job without a slice; None for the others.

        Where it is as it was at the last decision there is nothing to decide, and that is so for
        most of a thousand jobs that wait, at every round.
        """
        if job.slice is not None:
            return None
        return (
            job,
            self._zones(job.choices, pending),
            self.releases.may_still_run(job.id),
            self._clock() >= job.not_before,
        )

    def _pending(self) -> Counter[Choice]:
        """Requests of ours that wait in the cloud."""
        return Counter(
            Choice(r.job.slice.accelerator, r.job.slice.zone)
            for r in self.records.values()
            if r.job.slice and r.job.slice.phase in {SlicePhase.ASKING, SlicePhase.WAITING}
        )

    def reports(self, job: Job) -> tuple[HostReport, ...]:
        """The newest word from the hosts of the attempt under way."""
        if job.attempt is None:
            return ()
        session = self._sessions.get((job.id, job.attempt.number))
        return session.reports() if session else ()

    def _listen_to(self, job: Job) -> None:
        """Take in what the program tells of its steps."""
        reports = self.reports(job)
        if job.attempt is not None and reports:
            pattern = self.records[job.id].spec.get("progress")
            self.pulses.listen(job.id, job.attempt.number, reports, pattern)

    def session(self, job: Job) -> "SliceSession | None":
        """The open connections of the attempt under way."""
        return self._sessions.get((job.id, job.attempt.number)) if job.attempt else None

    def node(self, job: Job) -> Node | None:
        """The slice a job holds, as last seen."""
        look = self.looks.newest(job.slice.zone) if job.slice else None
        return look.nodes.get(job.slice.name) if look and job.slice else None

    def kept_for(self, job: Job) -> float | None:
        """Seconds until the slice that a cancelled job keeps is released; None if it has none."""
        if job.slice is None or job.kept_until is None or not job.status.ended:
            return None
        return max(0.0, job.kept_until - self._clock())

    # --- decide -----------------------------------------------------------------------------

    def _settle(self, job_id: str, pending: Counter[Choice]) -> None:
        record = self.records.get(job_id)
        if record is None:
            return  # it went while others were decided on
        job = record.job
        standing = self._standing(job, pending)
        if standing is not None and standing == self._waiting.get(job_id):
            return
        self._listen_to(job)
        decision = lifecycle.decide(
            job, self._seen(job, pending), self._clock(), self.config.patience
        )
        asked = decision.job.slice
        if asked is not None and asked.phase is SlicePhase.ASKING and job.slice is None:
            pending[Choice(asked.accelerator, asked.zone)] += 1
            self._open_zones.clear()
        self.apply(job, decision)
        if standing is not None and job_id in self.records:
            self._waiting[job_id] = standing

    def record(self, job_id: str) -> Record | None:
        """A job as it is now, whether it has ended or not; None where there is none of that id."""
        return self.records.get(job_id) or self.store.record(job_id)

    def take_in(self, record: Record) -> None:
        """A new job: from now on it is kept moving."""
        self.records[record.job.id] = record
        self.strays.gave(record.job.id)
        self.wake()

    def forget(self, job_id: str) -> None:
        """Nothing more happens to this job of itself: the store keeps what there is to know."""
        self.records.pop(job_id, None)
        self._waiting.pop(job_id, None)
        self.actions.forget(job_id)
        self.pulses.forget(job_id)

    def change(
        self,
        job_id: str,
        decided: Callable[[Record], Decision | None],
        spec: Mapping[str, Any] | None = None,
    ) -> Record | None:
        """Change a job, the one way to do so: `decided` is given its record as it is now.

        Nothing is awaited between reading and writing, so whatever is slow comes before, and
        `decided` looks again at what it builds on. None from it leaves the job as it is; a `spec`
        is written along with its decision. Returns the record as it is then, None where there is
        no such job.
        """
        record = self.record(job_id)
        if record is None:
            return None
        decision = decided(record)
        if decision is not None:
            self.records[job_id] = record
            self.apply(record.job, decision, spec)
        return self.record(job_id)

    def apply(self, before: Job, decision: Decision, spec: Mapping[str, Any] | None = None) -> None:
        """Write a decision down, then do what follows from it."""
        job = decision.job
        if job.status.ended and not before.status.ended:
            job = replace(job, ended_at=self._wall())
            decision = replace(decision, job=job)
        record = self.records[job.id]
        changed = job is not before and job != before
        # Why a job waits is only told. A thousand that wait for a zone learn of its news together,
        # and after a crash the first round tells it anew: no reason for a thousand writes.
        only_told = changed and replace(before, reason=job.reason) == job
        if (changed and not only_told) or decision.events or decision.ended or spec is not None:
            events = told_events(decision.events, job, record.spec)
            told = replace(decision, events=events)
            self.store.save(told, self._wall(), self.reports(before), spec)
            self.wake()
        if changed or spec is not None:
            given = record.spec if spec is None else spec
            name = str(given.get("name", record.name))
            self.records[job.id] = replace(record, job=job, spec=given, name=name)
        for ended in decision.ended:
            self._end_session(job.id, ended.attempt.number)
            self.pulses.end(job.id, ended.attempt.number)
        if job.status.ended and not before.status.ended:
            self.folders.forget_secrets(job.id)
        if job.slice and job.slice.phase is SlicePhase.READY and before.slice != job.slice:
            self._book.filled(Choice(job.slice.accelerator, job.slice.zone))
        for effect in decision.effects:
            self._act(job, effect)
        if job.status.ended and job.slice is None:
            self.forget(job.id)

    def _end_session(self, job_id: str, attempt: int) -> None:
        session = self._sessions.pop((job_id, attempt), None)
        self._stopped.discard((job_id, attempt))
        self._listening_since.pop((job_id, attempt), None)
        if session is not None:
            self.actions.start(f"close {job_id}/{attempt}", session.close)

    # --- act --------------------------------------------------------------------------------

    def _act(self, job: Job, effect: Effect) -> None:
        held = effect.slice
        match effect.kind:
            case EffectKind.ASK:
                key = f"ask {held.name}"
                if self.actions.may_start(key) and self._asks.take():
                    self.actions.start(key, lambda: self._ask(job.id, held), job.id)
            case EffectKind.DRIVE:
                if job.attempt and (job.id, job.attempt.number) in self._sessions:
                    self._keep_listening(job.id, job.attempt.number, held.zone)
                elif job.attempt:
                    key = f"drive {held.name}"
                    self.actions.start(key, lambda: self._drive(job.id, held), job.id)
            case EffectKind.STOP:
                if job.attempt and (job.id, job.attempt.number) not in self._stopped:
                    self._stop_soon(job.id, job.attempt.number, held)
            case EffectKind.LOOK:
                self.looks.soon(held.zone)
            case EffectKind.SHORT:
                self._book.short(Choice(held.accelerator, held.zone), effect.why, self._clock())
                self._open_zones.clear()
            case EffectKind.RELEASE:
                self.looks.soon(held.zone)

    def _stop_soon(self, job_id: str, number: int, held: Slice) -> None:
        """Stop the program; a server that has just started must first see where its hosts are."""
        if (job_id, number) not in self._sessions and self.looks.of(held) is None:
            self.looks.soon(held.zone)
            return
        key = f"stop {job_id}/{number}"
        self.actions.start(key, lambda: self._stop(job_id, number, held), job_id)

    async def _ask(self, job_id: str, held: Slice) -> None:
        record = self.records.get(job_id)
        if record is None:
            return
        wanted = slice_of(held.accelerator)
        request = SliceRequest(
            name=held.name,
            zone=held.zone,
            accelerator=held.accelerator,
            image=wanted.runtime_image or "",
            tier=str(record.spec.get("capacity", "spot")),
            labels={LABEL_OWNER: self._owner, LABEL_JOB: job_id},
            # With OS Login on, the hosts would not read the key from the metadata.
            metadata={"ssh-keys": f"drumline:{self._public_key}", "enable-oslogin": "FALSE"},
        )
        try:
            await self.cloud.ask(request)
        except CloudError as trouble:
            code, said = trouble.code, str(trouble)

            def refused(record: Record) -> Decision | None:
                if record.job.slice != held:
                    return None
                now, patience = self._clock(), self.config.patience
                return lifecycle.refused(record.job, code, said, now, patience)

            self.change(job_id, refused)
            return
        self.looks.asked_for(held)

        def asked(record: Record) -> Decision | None:
            return Decision(lifecycle.asked(record.job)) if record.job.slice == held else None

        self.change(job_id, asked)

    async def _drive(self, job_id: str, held: Slice) -> None:
        """Open connections to the hosts and have them run the attempt."""
        # Here, because SSH takes longer to load than all the rest of the server.
        from drumline.hosts.session import SliceSession

        record = self.records.get(job_id)
        if record is None:
            return
        attempt, node = record.job.attempt, self.node(record.job)
        if attempt is None or node is None or len(node.endpoints) != held.hosts:
            return
        try:
            keys = await self.cloud.host_keys(held.zone, held.name)
        except CloudError:
            keys = []
        keys = [*keys, *[None] * held.hosts][: held.hosts]
        if attempt.number > 3:
            logs, most = self.folders.logs(job_id), 3 * self.config.log_bytes // 4
            await asyncio.to_thread(trim, logs, attempt.number, most)
        addresses = [
            Address(e.ssh_ip, e.ssh_port, e.internal_ip, key)
            for e, key in zip(node.endpoints, keys, strict=True)
        ]
        now = self.records.get(job_id)
        if now is None or now.job.slice is None or now.job.slice.name != held.name:
            return
        if now.job.attempt != attempt:
            return
        self._sessions[(job_id, attempt.number)] = session = SliceSession(
            program_of(record, attempt.number, held, self.folders),
            addresses,
            key=self.folders.key,
            known_hosts=self.folders.all_known_hosts,
            node=held.name,
            logs=self.folders.logs(job_id, attempt.number),
            clock=self._clock,
            timing=self.config.timing,
            log_limit=self.config.log_limit(held.hosts),
        )
        self._listening_since[(job_id, attempt.number)] = self._clock()
        session.start()
        self._keep_listening(job_id, attempt.number, held.zone)

    def _keep_listening(self, job_id: str, number: int, zone: str) -> None:
        session = self._sessions[(job_id, number)]
        key = f"listen {job_id}/{number}"
        self.actions.start(key, lambda: self._listen(job_id, number, zone, session), job_id)

    async def _listen(self, job_id: str, number: int, zone: str, session: "SliceSession") -> None:
        """Wake the loop when a host has news; news of trouble brings the next look forward.

        A heartbeat alone is taken in here: with ten a second from each job, a round for every one
        would be all that the server does.
        """
        before: list[tuple[HostPhase, str, int | None, str, str]] = []
        while self._sessions.get((job_id, number)) is session:
            try:
                async with asyncio.timeout(1.0):
                    await session.changed.wait()
            except TimeoutError:
                continue
            session.changed.clear()
            state = [
                (r.phase, r.detail, r.exit_code, r.error, r.going_down) for r in session.reports()
            ]
            record = self.records.get(job_id)
            if state == before and record is not None:
                self._listen_to(record.job)
                continue
            if [host[:2] for host in state] != [host[:2] for host in before]:
                self.looks.soon(zone)
            before = state
            self.wake()

    async def _stop(self, job_id: str, number: int, held: Slice) -> None:
        record, session = self.records.get(job_id), self._sessions.get((job_id, number))
        if record is None:
            return
        if session is None:
            await self._drive(job_id, held)
            session = self._sessions.get((job_id, number))
        grace = record.job.grace
        if session is not None:
            try:
                async with asyncio.timeout(grace + STOP_LIMIT):
                    await session.stop(grace)
            except TimeoutError:
                log.warning("job %s: some hosts did not confirm the stop", job_id)
        self._stopped.add((job_id, number))

    def _release_slices(self) -> None:
        asking = self.actions.under_way("ask ")
        for row in self.releases.due(self._clock(), asking):
            self.actions.start(f"release {row.name}", partial(self.releases.release, row))


STOP_LIMIT = 10.0
"""Seconds beyond the grace that the hosts have to confirm that a program was ended."""
