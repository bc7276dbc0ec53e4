"""What is promised, whatever happens, and how each promise is checked.

While it goes on: a request stands in the database before the cloud hears of it; a program is
started once on a host; an attempt runs on one slice; a job has one program at a time. In the
morning, when nothing goes wrong any more: every job ends, as its user wished; what it ended as
follows from what its program did; nothing of ours is left in the cloud, and no secret at home.
"""

import asyncio
from collections import Counter
from dataclasses import dataclass

from drumline.jobs.core.state import Outcome, Status
from tests.simulation.cloud import SimulatedCloud
from tests.simulation.nature import Nature
from tests.simulation.server import Server

ASKS_A_MINUTE = 30.0
SPIN_WINDOW, SPINNING = 600.0, 20_000
"""Seconds, and callbacks in them that no ten jobs have use for; usually there are a few hundred."""
FAULT_OF_THE_PROGRAM = {Outcome.PROGRAM_FAILED.value, Outcome.STUCK.value}


@dataclass
class Word:
    """Something a user asked for, and what came of it."""

    verb: str
    asked: float
    done: float | None = None
    outcome: str = "under way"
    """`answered`, `refused` or `unknown`."""


class Said:
    """One call of a user, while it lasts."""

    def __init__(self, nature: Nature, word: Word) -> None:
        """It was just made."""
        self._nature, self._word = nature, word

    def _ends(self, outcome: str) -> None:
        self._word.done, self._word.outcome = self._nature.now(), outcome

    def answered(self, text: str) -> None:
        """The user was told that it is so."""
        self._ends("nothing" if "already" in text or "goes on by itself" in text else "answered")

    def refused(self) -> None:
        """The user was told that it is not so."""
        self._ends("refused")

    def unknown(self) -> None:
        """Nobody answered: it may or may not have been done."""
        self._ends("unknown")


class Promises:
    """Watches, and says in the end what was not kept."""

    def __init__(self, nature: Nature, cloud: SimulatedCloud, server: Server) -> None:
        """Nothing was promised yet."""
        self._nature, self._cloud, self._server = nature, cloud, server
        self._words: dict[str, list[Word]] = {}
        nature.starting = self._program_starts
        cloud.asking = self._request_is_made

    # While it goes on ----------------------------------------------------------------------------

    def created(self, job_id: str) -> None:
        """A user was given this id."""
        word = Word("create", self._nature.now(), self._nature.now(), "answered")
        self._words.setdefault(job_id, []).append(word)

    def asked(self, job_id: str, verb: str) -> Said:
        """A user asks something of a job."""
        word = Word(verb, self._nature.now())
        self._words.setdefault(job_id, []).append(word)
        return Said(self._nature, word)

    def _request_is_made(self, name: str) -> None:
        service = self._server.service
        if service is None:
            return
        row = service.store._db.execute("SELECT released FROM slices WHERE name = ?", (name,))
        if row.fetchone() is None:
            self._nature.breaks(f"{name} was asked for and stands nowhere")

    def _program_starts(self, job: str, attempt: int, host: str) -> None:
        nature = self._nature
        if nature.started[job, attempt, host] > 1:
            nature.breaks(f"attempt {attempt} of {job} was started twice on {host}")
        slices = {h.rpartition("/")[0] for j, a, h in nature.started if (j, a) == (job, attempt)}
        if len(slices) > 1:
            nature.breaks(f"attempt {attempt} of {job} was started on {sorted(slices)}")
        for other in nature.hosts.values():
            for kept in other.attempts.values():
                if kept.alive and kept.job == job and kept.attempt != attempt:
                    nature.breaks(
                        f"attempt {attempt} of {job} was started while {kept.attempt} ran"
                        f" on {other.name}"
                    )

    async def no_spinning(self) -> None:
        """Look now and then how much was done: a loop that goes round for nothing does most."""
        loop, before = self._nature.loop, 0
        while True:
            await asyncio.sleep(SPIN_WINDOW)
            if loop.steps - before > SPINNING:
                self._nature.breaks(f"the server spins: {loop.steps - before} callbacks in a row")
            before = loop.steps

    # In the morning ------------------------------------------------------------------------------

    async def come_true(self, morning: float, tidy: float) -> None:
        """Wait for the end of all jobs, and for the cloud to be empty."""
        nature = self._nature
        deadline = nature.now() + morning
        while (going := self._going()) and nature.now() < deadline:
            await asyncio.sleep(120.0)
        for job_id, told in going.items():
            nature.breaks(f"{job_id} never ended: {told}")
        deadline = nature.now() + tidy
        while self._cloud.resources() and nature.now() < deadline:
            await asyncio.sleep(120.0)
        for name in sorted(self._cloud.resources()):
            nature.breaks(f"{name} is left in the cloud")
        self._check_jobs()
        self._check_calls()

    def _going(self) -> dict[str, str]:
        service = self._server.service
        assert service is not None
        return {
            record.job.id: f"{record.job.status}: {record.job.reason}"
            for record in service.supervisor.records.values()
            if not record.job.status.ended
        }

    def _check_jobs(self) -> None:
        service, nature = self._server.service, self._nature
        assert service is not None
        for job_id, words in self._words.items():
            record = service.supervisor.record(job_id)
            cleaned = any(w.verb == "clean" and w.outcome in {"answered", "unknown"} for w in words)
            if record is None:
                if not cleaned:
                    nature.breaks(f"{job_id} is gone, and nobody cleaned it")
                continue
            if any(w.verb == "clean" and w.outcome == "answered" for w in words):
                nature.breaks(f"{job_id} was cleaned and is still there")
                continue
            status = record.job.status
            self._check_wish(job_id, words, status)
            outcomes = Counter(a["outcome"] for a in service.store.attempts(job_id))
            blamed = sum(outcomes[outcome] for outcome in FAULT_OF_THE_PROGRAM)
            had = nature.failures.get(job_id, 0)
            if blamed > had:
                nature.breaks(f"{job_id} is blamed for {blamed} failures and had {had}")
                for attempt in service.store.attempts(job_id):
                    nature.note("attempt", attempt["number"], attempt["outcome"], attempt["detail"])
            if status is Status.FAILED and blamed == 0 and job_id not in nature.excused:
                nature.breaks(f"{job_id} failed by no fault of its own: {record.job.reason}")
            saved, steps = nature.buckets.get(job_id), nature.plans[job_id].steps
            if status is Status.SUCCEEDED and (saved is None or saved.saved < steps):
                nature.breaks(f"{job_id} succeeded and was not done")
            if service.folders.secrets(job_id):
                nature.breaks(f"the secrets of {job_id} are still there")

    def _check_wish(self, job_id: str, words: list[Word], status: Status) -> None:
        last = words[-1]
        before = words[:-1]
        if last.outcome not in {"answered"} or any((w.done or 0.0) > last.asked for w in before):
            return  # nobody can say whose word was the last
        if any(w.outcome == "unknown" for w in words):
            return
        if last.verb in {"create", "resume"} and status is Status.CANCELLED:
            self._nature.breaks(f"{job_id} was to run and is {status}")
        if last.verb in {"cancel", "delete"} and not status.ended:
            self._nature.breaks(f"{job_id} was to end and is {status}")

    def _check_calls(self) -> None:
        asks = self._cloud.calls["ask"]
        for first, at in enumerate(asks):
            within = [other for other in asks[first:] if other < at + 60.0]
            if len(within) > ASKS_A_MINUTE * (1 + self._server.lives):
                self._nature.breaks(f"{len(within)} requests were made within a minute")
                return
