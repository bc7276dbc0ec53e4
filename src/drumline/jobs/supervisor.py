"""The loop: observe → decide → write down → act.

Each zone is looked at once a tick with two list calls, however many jobs there are; each host is
heard through its open connection. A look that fails changes nothing but the age of what is known.
Everything slow runs in tasks of its own, one per slice and purpose, and wakes the loop when done.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from drumline.chips import slice_of
from drumline.cloud.protocol import Cloud, CloudError, Node, SliceRequest
from drumline.hosts.session import SliceSession
from drumline.hosts.values import Address, HostPhase, HostReport
from drumline.jobs import lifecycle
from drumline.jobs.config import Config
from drumline.jobs.folders import Folders
from drumline.jobs.logs import trim
from drumline.jobs.looks import Looks
from drumline.jobs.program import program_of, told_events
from drumline.jobs.pulses import Pulses
from drumline.jobs.releases import LABEL_JOB, LABEL_OWNER, Releases
from drumline.jobs.state import (
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
from drumline.jobs.store import Record, Store
from drumline.jobs.zones import ZoneBook

log = logging.getLogger(__name__)

SWEEP_SECONDS = 300.0
"""Between two looks at zones where nothing of ours should be; a forgotten slice costs money."""
ROUND_PAUSE = 0.02
"""Seconds between two rounds at least, so that a burst of news is one round and not many."""


class Supervisor:
    """Keeps every job moving until it is closed."""

    def __init__(
        self,
        store: Store,
        cloud: Cloud,
        config: Config,
        public_key: str,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Take up every job where the store left it."""
        self.store = store
        self.config = config
        self.folders = Folders(config.home)
        self.records: dict[str, Record] = {r.job.id: r for r in store.records()}
        living = {job_id for job_id, r in self.records.items() if not r.job.status.ended}
        self.folders.forget_other_secrets(living)
        self.cloud = cloud
        self.looks = Looks(cloud, config.look_seconds, clock)
        self.pulses = Pulses(store, self.folders, clock)
        self.changed = asyncio.Condition()
        self._public_key = public_key
        self._clock = clock
        self._owner = store.owner
        self._ask_after: dict[str, float] = {}
        self._book = ZoneBook(scale=config.zone_rest_scale)
        self._open_zones: dict[tuple[Choice, ...], dict[Choice, Zone]] = {}
        self._tokens = config.asks_a_minute
        self._tokens_at = clock()
        self._sessions: dict[tuple[str, int], SliceSession] = {}
        self._listening_since: dict[tuple[str, int], float] = {}
        self._stopped: set[tuple[str, int]] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        self._swept_at = float("-inf")
        self._releases = Releases(store, cloud, self.looks, self.folders)

    # --- the loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Go on until cancelled. An error with one job is logged and does not touch the others."""
        while True:
            self._wake.clear()
            now = self._clock()
            self._releases.begin_round()
            self._look_at_zones(now)
            self._release_slices(now)
            try:
                self.pulses.write()
            except Exception:
                log.exception("what programs told could not be written")
            pending = self._pending()
            self._open_zones.clear()
            for job_id in list(self.records):
                try:
                    self._settle(job_id, pending)
                except Exception:
                    log.exception("job %s", job_id)
            async with self.changed:
                self.changed.notify_all()
            await asyncio.sleep(ROUND_PAUSE)
            await self._sleep()

    async def _sleep(self) -> None:
        # Not wait_for, which in Python 3.11 swallows a cancellation that comes with the news.
        try:
            async with asyncio.timeout(max(self.looks.next_due(), 0.01)):
                await self._wake.wait()
        except TimeoutError:
            return

    async def close(self) -> None:
        """Let go of everything; programs and slices go on without us."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
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

    def _do(self, key: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` in a task of its own, unless the same is under way."""
        if key in self._tasks:
            return

        async def guarded() -> None:
            try:
                await work()
            except Exception:
                log.exception(key)
            finally:
                self._tasks.pop(key, None)
                self._wake.set()

        self._tasks[key] = asyncio.create_task(guarded(), name=key)

    # --- observe ----------------------------------------------------------------------------

    def _zones_of_interest(self) -> set[str]:
        held = {r.job.slice.zone for r in self.records.values() if r.job.slice}
        return held | {row.zone for row in self._releases.rows}

    def _look_at_zones(self, now: float) -> None:
        zones = self._zones_of_interest()
        if now - self._swept_at > SWEEP_SECONDS:
            zones |= set(self.config.zones) | self.store.zones_used()
            self._swept_at = now
        for zone in self.looks.due(zones):
            self._do(f"look {zone}", partial(self._look, zone))

    async def _look(self, zone: str) -> None:
        look = await self.looks.look(zone)
        if look is not None:
            held = {r.job.slice.name for r in self.records.values() if r.job.slice}
            self._releases.take_in_strays(look, held)

    def _seen(self, job: Job, pending: Counter[Choice]) -> Seen:
        waits = job.slice is None or job.slice.phase is not SlicePhase.READY
        return Seen(
            look=self.looks.of(job.slice) if job.slice else None,
            hosts=self.reports(job),
            listening_since=self._listening_since.get((job.id, job.attempt.number))
            if job.attempt
            else None,
            zones=self._zones(job.choices, pending) if waits else {},
            old_slice_alive=job.slice is None and self._releases.may_still_run(job.id),
            stopped=job.attempt is not None and (job.id, job.attempt.number) in self._stopped,
            course=self.pulses.course(job.id, job.attempt.number) if job.attempt else None,
        )

    def _zones(
        self, choices: tuple[Choice, ...], pending: Counter[Choice]
    ) -> Mapping[Choice, Zone]:
        """Where one may ask now; jobs with the same choices share the answer until one asks."""
        if choices not in self._open_zones:
            now = self._clock()
            self._open_zones[choices] = {
                choice: self._book.zone(choice, pending[choice], now) for choice in choices
            }
        return self._open_zones[choices]

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

    def session(self, job: Job) -> SliceSession | None:
        """The open connections of the attempt under way."""
        return self._sessions.get((job.id, job.attempt.number)) if job.attempt else None

    def node(self, job: Job) -> Node | None:
        """The slice a job holds, as last seen."""
        look = self.looks.newest(job.slice.zone) if job.slice else None
        return look.nodes.get(job.slice.name) if look and job.slice else None

    # --- decide -----------------------------------------------------------------------------

    def _settle(self, job_id: str, pending: Counter[Choice]) -> None:
        job = self.records[job_id].job
        if job.status.ended and job.slice is None:
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

    def apply(self, before: Job, decision: Decision) -> None:
        """Write a decision down, then do what follows from it."""
        job = decision.job
        record = self.records[job.id]
        changed = job is not before and job != before
        # Why a job waits is only told. A thousand that wait for a zone learn of its news together,
        # and after a crash the first round tells it anew: no reason for a thousand writes.
        only_told = changed and replace(before, reason=job.reason) == job
        if (changed and not only_told) or decision.events or decision.ended:
            events = told_events(decision.events, job, record.spec)
            told = replace(decision, events=events)
            self.store.save(told, self._clock(), self.reports(before))
            self.wake()
        if changed:
            self.records[job.id] = replace(record, job=job)
        for ended in decision.ended:
            self.pulses.end(job.id, ended.attempt.number)
            self._end_session(job.id, ended.attempt.number)
        if job.status.ended and not before.status.ended:
            self.folders.forget_secrets(job.id)
        if job.slice and job.slice.phase is SlicePhase.READY and before.slice != job.slice:
            self._book.filled(Choice(job.slice.accelerator, job.slice.zone))
        for effect in decision.effects:
            self._act(job, effect)

    def _end_session(self, job_id: str, attempt: int) -> None:
        session = self._sessions.pop((job_id, attempt), None)
        self._stopped.discard((job_id, attempt))
        self._listening_since.pop((job_id, attempt), None)
        if session is not None:
            self._do(f"close {job_id}/{attempt}", session.close)

    # --- act --------------------------------------------------------------------------------

    def _act(self, job: Job, effect: Effect) -> None:
        one = effect.slice
        match effect.kind:
            case EffectKind.ASK:
                if self._clock() >= self._ask_after.get(one.name, 0.0) and self._may_ask():
                    self._do(f"ask {one.name}", lambda: self._ask(job.id, one))
            case EffectKind.DRIVE:
                if job.attempt and (job.id, job.attempt.number) not in self._sessions:
                    self._do(f"drive {one.name}", lambda: self._drive(job.id, one))
            case EffectKind.STOP:
                if job.attempt and (job.id, job.attempt.number) not in self._stopped:
                    number = job.attempt.number
                    self._do(f"stop {job.id}/{number}", lambda: self._stop(job.id, number, one))
            case EffectKind.LOOK:
                self.looks.soon(one.zone)
            case EffectKind.SHORT:
                self._book.short(Choice(one.accelerator, one.zone), effect.why, self._clock())
                self._open_zones.clear()
            case EffectKind.RELEASE:
                self.looks.soon(one.zone)

    def _may_ask(self) -> bool:
        """A token for each create call, refilled by the minute: the cloud limits these."""
        now, rate = self._clock(), self.config.asks_a_minute
        self._tokens = min(rate, self._tokens + (now - self._tokens_at) * rate / 60)
        self._tokens_at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

    async def _ask(self, job_id: str, one: Slice) -> None:
        record = self.records[job_id]
        wanted = slice_of(one.accelerator)
        request = SliceRequest(
            name=one.name,
            zone=one.zone,
            accelerator=one.accelerator,
            image=wanted.runtime_image or "",
            tier=str(record.spec.get("capacity", "spot")),
            labels={LABEL_OWNER: self._owner, LABEL_JOB: job_id},
            # With OS Login on, the hosts would not read the key from the metadata.
            metadata={"ssh-keys": f"drumline:{self._public_key}", "enable-oslogin": "FALSE"},
        )
        try:
            await self.cloud.ask(request)
        except CloudError as trouble:
            job = self.records[job_id].job
            if job.slice == one:
                self._ask_after[one.name] = self._clock() + self.config.look_seconds
                decision = lifecycle.refused(job, trouble.code, str(trouble), self._clock())
                self.apply(job, decision)
            return
        self.looks.asked_for(one)
        job = self.records[job_id].job
        if job.slice == one:
            self.apply(job, Decision(lifecycle.asked(job)))

    async def _drive(self, job_id: str, one: Slice) -> None:
        """Open connections to the hosts and have them run the attempt."""
        record = self.records[job_id]
        attempt, node = record.job.attempt, self.node(record.job)
        if attempt is None or node is None or len(node.endpoints) != one.hosts:
            return
        try:
            keys = await self.cloud.host_keys(one.zone, one.name)
        except CloudError:
            keys = []
        keys = [*keys, *[None] * one.hosts][: one.hosts]
        if attempt.number > 3:
            logs, most = self.folders.logs(job_id), 3 * self.config.log_bytes // 4
            await asyncio.to_thread(trim, logs, attempt.number, most)
        addresses = [
            Address(e.ssh_ip, e.ssh_port, e.internal_ip, key)
            for e, key in zip(node.endpoints, keys, strict=True)
        ]
        job = self.records[job_id].job
        if job.slice is None or job.slice.name != one.name or job.attempt != attempt:
            return
        session = self._sessions[(job_id, attempt.number)] = SliceSession(
            program_of(record, attempt.number, one, self.folders),
            addresses,
            key=self.folders.key,
            known_hosts=self.folders.all_known_hosts,
            node=one.name,
            logs=self.folders.logs(job_id, attempt.number),
            clock=self._clock,
            timing=self.config.timing,
            log_limit=self.config.log_limit(one.hosts),
        )
        self._listening_since[(job_id, attempt.number)] = self._clock()
        session.start()
        self._do(
            f"listen {job_id}/{attempt.number}",
            lambda: self._listen(job_id, attempt.number, one.zone, session),
        )

    async def _listen(self, job_id: str, number: int, zone: str, session: SliceSession) -> None:
        """Wake the loop when a host has news; news of trouble brings the next look forward.

        A heartbeat alone is taken in here: with ten a second from each job, a round for every one
        would be all that the server does.
        """
        before: list[tuple[HostPhase, str, int | None, str]] = []
        while self._sessions.get((job_id, number)) is session:
            try:
                async with asyncio.timeout(1.0):
                    await session.changed.wait()
            except TimeoutError:
                continue
            session.changed.clear()
            state = [(r.phase, r.detail, r.exit_code, r.error) for r in session.reports()]
            if state == before:
                self._listen_to(self.records[job_id].job)
                continue
            if [one[:2] for one in state] != [one[:2] for one in before]:
                self.looks.soon(zone)
            before = state
            self.wake()

    async def _stop(self, job_id: str, number: int, one: Slice) -> None:
        session = self._sessions.get((job_id, number))
        if session is None:
            await self._drive(job_id, one)
            session = self._sessions.get((job_id, number))
        grace = self.records[job_id].job.grace
        if session is not None:
            try:
                async with asyncio.timeout(grace + STOP_LIMIT):
                    await session.stop(grace)
            except TimeoutError:
                log.warning("job %s: some hosts did not confirm the stop", job_id)
        self._stopped.add((job_id, number))

    def _release_slices(self, now: float) -> None:
        asking = {key.removeprefix("ask ") for key in self._tasks if key.startswith("ask ")}
        for row in self._releases.due(now, asking):
            self._ask_after.pop(row.name, None)
            self._do(f"release {row.name}", partial(self._releases.release, row))


STOP_LIMIT = 10.0
"""Seconds beyond the grace that the hosts have to confirm that a program was ended."""
