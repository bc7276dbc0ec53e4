"""The invariants of the job manager, and their checks.

During the schedule: a request is saved before it is sent to the cloud; a program is started once on
a host; an attempt runs on one slice; a job has one program at a time, and none after its user was
told that it ends. After the faults have stopped: every job ends as its user wants; its status
follows from its program; no more faults of hosts and cloud are recorded than there were; no
resource is left in the cloud, and no secret in the home.
"""

import asyncio
import math
from collections import Counter
from dataclasses import dataclass

from drumline.jobs.core.state import DesiredState, Job, Outcome, Status
from tests.simulation.cloud import SimulatedCloud
from tests.simulation.environment import Environment
from tests.simulation.server import ASKS_A_MINUTE, Server

LATE = 300.0
"""Seconds after the answer to a cancel within which a start may still come through: it was on its
way to a host that is slow to answer."""
SPIN_WINDOW, SPINNING = 600.0, 20_000
"""Seconds, and callbacks in them that no ten jobs have use for; usually there are a few hundred."""
_ENDS = {"cancel", "delete", "clean"}
FAULT_OF_THE_PROGRAM = {Outcome.PROGRAM_FAILED.value, Outcome.STUCK.value}


@dataclass
class UserRequest:
    """A command of a user, and its result."""

    verb: str
    asked: float
    done: float | None = None
    outcome: str = "under way"
    """`answered`, `nothing` (it was so already), `refused` or `unknown`."""
    too_late: bool = False
    """True if the job had already ended."""


class PendingRequest:
    """A command of a user that has no result yet."""

    def __init__(self, environment: Environment, user_request: UserRequest) -> None:
        """Begin the command."""
        self._environment, self._request = environment, user_request

    def _ends(self, outcome: str) -> None:
        self._request.done, self._request.outcome = self._environment.now(), outcome

    def answered(self, text: str) -> None:
        """Record that the server executed the command."""
        self._ends("nothing" if "already" in text or "goes on by itself" in text else "answered")

    def refused(self) -> None:
        """Record that the server refused the command."""
        self._ends("refused")

    def unknown(self) -> None:
        """Record that the server did not respond, so the result is unknown."""
        self._ends("unknown")


class Invariants:
    """The checks of all invariants for one server."""

    def __init__(self, environment: Environment, cloud: SimulatedCloud, server: Server) -> None:
        """Watch the requests to the cloud and the starts of programs."""
        self._environment, self._cloud, self._server = environment, cloud, server
        self._user_requests: dict[str, list[UserRequest]] = {}
        self._asks: list[float] = []
        """The times of this server's requests for slices."""
        environment.starting.append(self._program_starts)
        cloud.asking.append(self._request_is_made)

    def _key(self, job_id: str) -> str:
        """Return the name of a job of this server among all homes."""
        return self._environment.key(self._server.owner, job_id)

    # During the schedule -------------------------------------------------------------------------

    def created(self, job_id: str) -> None:
        """Record that a user created a job with this id."""
        user_request = UserRequest(
            "create", self._environment.now(), self._environment.now(), "answered"
        )
        self._user_requests.setdefault(job_id, []).append(user_request)

    def asked(self, job_id: str, verb: str) -> PendingRequest:
        """Record that a user gives a command on a job."""
        service = self._server.service
        record = service.supervisor.record(job_id) if service else None
        ended = record is not None and record.job.status.ended
        user_request = UserRequest(verb, self._environment.now(), too_late=ended)
        self._user_requests.setdefault(job_id, []).append(user_request)
        return PendingRequest(self._environment, user_request)

    def _request_is_made(self, name: str) -> None:
        service = self._server.service
        if service is None or f"-{self._server.owner}-" not in name:
            return
        row = service.store._db.execute("SELECT released FROM slices WHERE name = ?", (name,))
        self._asks.append(self._environment.now())
        if row.fetchone() is None:
            self._environment.fail(f"{name} was requested but is in no record")

    def _program_starts(self, job: str, attempt: int, host: str) -> None:
        environment, job_id = self._environment, job.partition("@")[0]
        if job != self._key(job_id):
            return
        if environment.started[job, attempt, host] > 1:
            environment.fail(f"attempt {attempt} of {job} was started twice on {host}")
        slices = {
            h.rpartition("/")[0] for j, a, h in environment.started if (j, a) == (job, attempt)
        }
        if len(slices) > 1:
            environment.fail(f"attempt {attempt} of {job} was started on {sorted(slices)}")
        for other in environment.hosts.values():
            for kept in other.attempts.values():
                if (kept.job, kept.attempt) in environment.liars:
                    continue
                if kept.alive and kept.job == job and kept.attempt != attempt:
                    environment.fail(
                        f"attempt {attempt} of {job} was started while {kept.attempt} ran"
                        f" on {other.name}"
                    )
        last = self._last_request(job_id)
        if last and last.verb in _ENDS and last.done and environment.now() > last.done + LATE:
            environment.fail(
                f"attempt {attempt} of {job} was started after the answer to {last.verb}"
            )

    def _last_request(self, job: str) -> UserRequest | None:
        """What a user said last and was granted; None where nobody can say whose word that was."""
        words = [
            w for w in self._user_requests.get(job, []) if w.outcome not in {"refused", "nothing"}
        ]
        if not words or words[-1].outcome != "answered":
            return None
        # An answer that never came may stand for something that comes yet.
        *before, last = words
        if any(w.outcome == "unknown" or (w.done or math.inf) > last.asked for w in before):
            return None
        return last

    async def watch(self) -> None:
        """Look now and then at what should never be so."""
        loop, before = self._environment.loop, 0
        while True:
            await asyncio.sleep(SPIN_WINDOW)
            # A loop that goes round for nothing does most.
            if loop.steps - before > SPINNING:
                self._environment.fail(
                    f"the server spins: {loop.steps - before} callbacks in a row"
                )
            before = loop.steps
            self._check_kept_slices()
            self._check_cancelled_programs()

    def _check_cancelled_programs(self) -> None:
        """No program runs whose job is CANCELLED."""
        service, environment = self._server.service, self._environment
        runs = [run for host in environment.hosts.values() for run in host.attempts.values()]
        for run in runs if service else ():
            job_id = run.job.partition("@")[0]
            ours = run.alive and run.job == self._key(job_id)
            if not ours or service is None or (run.job, run.attempt) in environment.liars:
                continue
            record = service.supervisor.record(job_id)
            if record is not None and record.job.status is Status.CANCELLED:
                text = f"{run.job} is CANCELLED, and its attempt {run.attempt} runs"
                environment.fail(f"{text} on {run.host.name}")

    def _check_kept_slices(self) -> None:
        """No slice is kept for a resume after its user was told that it is released."""
        service = self._server.service
        for record in service.supervisor.records.values() if service else ():
            job = record.job
            if job.placement is None or not job.status.ended or job.wish is DesiredState.DELETE:
                continue
            if job.status is Status.FAILED:
                self._check_programs_ended(job, job.placement.name)
            for user_request in reversed(self._user_requests.get(job.id, [])):
                if user_request.verb in {"create", "resume"}:
                    break
                if user_request.verb == "delete" and user_request.outcome == "answered":
                    self._environment.fail(f"{job.id} was deleted, and its slice is kept")

    def _check_programs_ended(self, job: Job, kept: str) -> None:
        """No program runs on the slice that a failed job keeps."""
        for host in self._environment.hosts.values():
            for attempt in host.attempts.values():
                if (attempt.job, attempt.attempt) in self._environment.liars:
                    continue
                if attempt.alive and host.name.startswith(f"{kept}/"):
                    self._environment.fail(f"{job.id} failed and runs on its kept {host.name}")

    # In the morning ------------------------------------------------------------------------------

    async def jobs_end(self, deadline: float) -> None:
        """Wait for the end of all jobs."""
        while (going := self._unfinished_jobs()) and self._environment.now() < deadline:
            await asyncio.sleep(120.0)
        for job_id, state in going.items():
            self._environment.fail(f"{job_id} never ended: {state}")

    async def cloud_is_empty(self, deadline: float) -> None:
        """Wait until nothing of ours is left in the cloud."""
        while self._cloud.resources() and self._environment.now() < deadline:
            await asyncio.sleep(120.0)
        self.check_at_end()
        self._check_calls()

    def check_at_end(self) -> None:
        """What holds now that all is over, and from now on."""
        for job_id, state in self._unfinished_jobs().items():
            self._environment.fail(f"{job_id} is not over: {state}")
        for name in sorted(self._cloud.resources()):
            self._environment.fail(f"{name} is left in the cloud")
        for job_id, words in self._user_requests.items():
            self._check_job(job_id, words)

    def _unfinished_jobs(self) -> dict[str, str]:
        service = self._server.service
        assert service is not None
        return {
            record.job.id: f"{record.job.status}: {record.job.reason}"
            for record in service.supervisor.records.values()
            if not record.job.status.ended
        }

    def _check_job(self, job_id: str, words: list[UserRequest]) -> None:
        service, environment = self._server.service, self._environment
        assert service is not None
        record = service.supervisor.record(job_id)
        if record is None:
            if not any(w.verb == "clean" and w.outcome in {"answered", "unknown"} for w in words):
                environment.fail(f"{job_id} is gone, and nobody cleaned it")
            return
        if any(w.verb == "clean" and w.outcome == "answered" for w in words):
            environment.fail(f"{job_id} was cleaned and is still there")
            return
        job = record.job
        last = self._last_request(job_id)
        if last and last.verb in {"create", "resume"} and job.status is Status.CANCELLED:
            environment.fail(f"{job_id} was to run and is {job.status}")
        cancelled = last is not None and last.verb in {"cancel", "delete"} and not last.too_late
        if cancelled and job.status is Status.FAILED:
            environment.fail(f"{job_id} was to be cancelled and is {job.status}: {job.reason}")
        if service.folders.secrets(job_id):
            environment.fail(f"the secrets of {job_id} are still there")
        key = self._key(job_id)
        if any(run[0] == key for run in environment.liars):
            return  # what such a host gave out, nobody could have known better
        saved, steps = environment.buckets.get(key), environment.plans[key].steps
        if job.status is Status.SUCCEEDED and (saved is None or saved.saved < steps):
            environment.fail(f"{job_id} succeeded and was not done")
        self._check_counts(job, words)

    def _check_counts(self, job: Job, words: list[UserRequest]) -> None:
        """Nobody is blamed for more than he did: the program, the hosts, the cloud."""
        service, environment = self._server.service, self._environment
        assert service is not None
        attempts = service.store.attempts(job.id)
        rows = service.store._db.execute("SELECT name FROM slices WHERE job = ?", (job.id,))
        slices = {str(row[0]) for row in rows}
        had = environment.failures.get(self._key(job.id), 0)
        faults = sum(environment.host_faults[name] for name in slices)
        outcomes = Counter(attempt["outcome"] for attempt in attempts)
        blamed = sum(outcomes[outcome] for outcome in FAULT_OF_THE_PROGRAM)
        setup = outcomes[Outcome.SETUP_FAILED.value]
        for what, counted, most in (
            ("failures of its program", blamed, had),
            ("bad hosts and set-ups", outcomes[Outcome.BAD_HOST.value] + setup, faults),
            ("preemptions", outcomes[Outcome.PREEMPTED.value], len(slices & environment.taken)),
        ):
            if counted > most:
                environment.fail(f"{job.id} has {counted} {what} on record, and had {most}")
                for attempt in attempts:
                    environment.note(
                        "attempt", attempt["number"], attempt["outcome"], attempt["detail"]
                    )
        untouched = not faults and not slices & environment.taken and len(words) == 1
        if untouched and blamed < had:
            environment.fail(f"{job.id} failed {had} times, and {blamed} are on record")
        allowed = job.allowance.failures or 0
        if job.status is Status.FAILED and blamed + setup <= allowed:
            environment.fail(f"{job.id} failed within its allowance: {job.reason}")
        if blamed + setup > allowed + 1 and not any(
            user_request.verb == "resume" for user_request in words
        ):
            environment.fail(f"{job.id} went on after {blamed} failures, and was allowed {allowed}")
        if [attempt["number"] for attempt in attempts] != list(range(1, len(attempts) + 1)):
            environment.fail(f"an attempt of {job.id} is not on record")

    def _check_calls(self) -> None:
        asks, started = self._asks, self._server.started
        for first, at in enumerate(asks):
            within = sum(other < at + 60.0 for other in asks[first:])
            # A minute's worth at once, then so many a minute; each new server begins with its own.
            lives = 1 + sum(at < began < at + 60.0 for began in started)
            if within > ASKS_A_MINUTE * (1 + lives):
                self._environment.fail(f"{within} requests were made within a minute")
                return
