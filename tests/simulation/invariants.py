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

from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import (
    DesiredState,
    Job,
    PlacementRole,
    Status,
)
from tests.simulation.cloud import SimulatedCloud
from tests.simulation.environment import Environment
from tests.simulation.hosts import OUTPUT
from tests.simulation.server import REQUESTS_PER_MINUTE, Server

LATE = 300.0
"""Seconds after the answer to a cancel within which a program may still start, because a slow host
may still execute an earlier start.
"""
OTHER_REQUESTS_KEPT = 3600.0
"""Seconds after the start of a program within which the job withdraws its other requests."""
DELETE_REPEATED = 3600.0
"""Seconds within which the deletion of a slice is repeated."""
SPIN_WINDOW, SPINNING = 600.0, 20_000
"""A window in seconds, and more callbacks than ten jobs need in it; usually there are a few
hundred.
"""
_ENDS = {"cancel", "delete", "clean"}
FAULT_OF_THE_PROGRAM = {EndReason.PROGRAM_FAILED.value, EndReason.STUCK.value}


@dataclass
class UserRequest:
    """A command of a user, and its result."""

    verb: str
    asked: float
    done: float | None = None
    outcome: str = "under way"
    """`answered`, `nothing` (the job was already in this state), `refused` or `unknown`."""
    too_late: bool = False
    """True if the job had already ended."""

    @property
    def without_effect(self) -> bool:
        """True if the server refused it, or had nothing to do."""
        return self.outcome in {"refused", "nothing"}

    def overlaps(self, later: "UserRequest") -> bool:
        """Return True if it had no answer yet when a later command was given."""
        return (self.done or math.inf) > later.asked


class PendingRequest:
    """A command of a user that has no result yet."""

    def __init__(self, environment: Environment, user_request: UserRequest) -> None:
        """Begin the command."""
        self._environment, self._request = environment, user_request

    def _finish(self, outcome: str) -> None:
        self._request.done, self._request.outcome = self._environment.now(), outcome

    def answered(self, text: str) -> None:
        """Record that the server executed the command."""
        self._finish("nothing" if "already" in text or "goes on by itself" in text else "answered")

    def refused(self) -> None:
        """Record that the server refused the command."""
        self._finish("refused")

    def unknown(self) -> None:
        """Record that the server did not respond, so the result is unknown."""
        self._finish("unknown")


class Invariants:
    """The checks of all invariants for one server."""

    def __init__(self, environment: Environment, cloud: SimulatedCloud, server: Server) -> None:
        """Watch the requests to the cloud and the starts of programs."""
        self._environment, self._cloud, self._server = environment, cloud, server
        self._user_requests: dict[str, list[UserRequest]] = {}
        self._request_times: list[float] = []
        """The times of this server's requests for slices."""
        environment.start_checks.append(self._program_starts)
        cloud.request_checks.append(self._request_is_made)

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
        self._request_times.append(self._environment.now())
        if row.fetchone() is None:
            self._environment.fail(f"{name} was requested but is in no record")
        record = service.supervisor.record(name.split("-")[2])
        zones = [request.zone for request in record.job.requests] if record else []
        if record is not None and (len(zones) > record.job.ask or len({*zones}) < len(zones)):
            self._environment.fail(
                f"{record.job.id} asks in {', '.join(zones)}, and may ask in {record.job.ask} zones"
            )

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
            for failed_slice in other.attempts.values():
                if (failed_slice.job, failed_slice.attempt) in environment.misreported_runs:
                    continue
                if self._is_abandoned(other.name):
                    continue
                if (
                    failed_slice.alive
                    and failed_slice.job == job
                    and failed_slice.attempt != attempt
                ):
                    environment.fail(
                        f"attempt {attempt} of {job} was started while {failed_slice.attempt} ran"
                        f" on {other.name}"
                    )
        last = self._last_request(job_id)
        if last and last.verb in _ENDS and last.done and environment.now() > last.done + LATE:
            environment.fail(
                f"attempt {attempt} of {job} was started after the answer to {last.verb}"
            )

    def _is_abandoned(self, host: str) -> bool:
        """Return True if the deletion of a host's slice lasts so long that its job may go on.

        While the calls to delete it fail, the server must know that its program is harmless. Such
        a time counts although the deletion has begun after it.
        """
        name, now = host.rpartition("/")[0], self._environment.now()
        patience = self._server._config.timeouts.deleting
        deletion = self._cloud.endless_deletions.get(name)
        if deletion is not None and now - deletion.began_at > patience:
            return True
        service = self._server.service
        rows = service.store.releasing() if service else []
        harmless = any(row.name == name and row.program for row in rows)
        return harmless and now - self._cloud.deletes.get(name, [now])[0] > patience

    def _last_request(self, job: str) -> UserRequest | None:
        """Return the user's last granted command; None if a pending one makes it unclear."""
        requests = [w for w in self._user_requests.get(job, []) if not w.without_effect]
        if not requests or requests[-1].outcome != "answered":
            return None
        # A command without an answer may still take effect.
        *earlier, last = requests
        if any(w.outcome == "unknown" or w.overlaps(last) for w in earlier):
            return None
        return last

    async def watch(self) -> None:
        """Check the continuous invariants at intervals."""
        loop, earlier = self._environment.loop, 0
        while True:
            await asyncio.sleep(SPIN_WINDOW)
            # A busy loop shows in the number of callbacks.
            if loop.steps - earlier > SPINNING:
                self._environment.fail(f"the server spins: {loop.steps - earlier} callbacks")
            earlier = loop.steps
            self._check_kept_slices()
            self._check_races()
            self._check_cancelled_programs()

    def _check_cancelled_programs(self) -> None:
        """Check that no program of a CANCELLED job runs."""
        service, environment = self._server.service, self._environment
        runs = [run for host in environment.hosts.values() for run in host.attempts.values()]
        for run in runs if service else ():
            job_id = run.job.partition("@")[0]
            is_own = run.alive and run.job == self._key(job_id)
            if (
                not is_own
                or service is None
                or (run.job, run.attempt) in environment.misreported_runs
            ):
                continue
            record = service.supervisor.record(job_id)
            if record is not None and record.job.status is Status.CANCELLED:
                text = f"{run.job} is CANCELLED, and its attempt {run.attempt} runs"
                environment.fail(f"{text} on {run.host.name}")

    def _check_races(self) -> None:
        """Check that a job uses one slice, and keeps no other requests while its program runs."""
        service = self._server.service
        for record in service.supervisor.records.values() if service else ():
            job = record.job
            active = [p.name for p in job.placements if p.role is PlacementRole.ACTIVE]
            if len(active) > 1:
                self._environment.fail(f"{job.id} uses {' and '.join(active)} at the same time")
            started = job.attempt.running_at if job.attempt else None
            now = self._environment.now()
            keeps_requests = bool(job.requests) and not job.migrates
            if keeps_requests and started is not None and now - started > OTHER_REQUESTS_KEPT:
                self._environment.fail(f"{job.id} runs, and still requests {job.requests[0].name}")

    def _check_kept_slices(self) -> None:
        """Check that no slice is kept after its user deleted the job."""
        service = self._server.service
        for record in service.supervisor.records.values() if service else ():
            job = record.job
            if job.active is None or not job.status.ended or job.wish is DesiredState.DELETE:
                continue
            if job.status is Status.FAILED:
                self._check_programs_ended(job, job.active.name)
            requests = [w for w in self._user_requests.get(job.id, []) if not w.without_effect]
            resumes = [w for w in requests if w.verb in {"create", "resume"}]
            for user_request in reversed(requests):
                if user_request in resumes:
                    break
                # Of two commands at the same time, the server may execute the earlier one last.
                unclear = any(resume.overlaps(user_request) for resume in resumes)
                deleted = user_request.verb == "delete" and user_request.outcome == "answered"
                if deleted and not unclear:
                    self._environment.fail(f"{job.id} was deleted, and its slice is kept")

    def _check_programs_ended(self, job: Job, failed_slice: str) -> None:
        """Check that no program runs on the slice that a failed job keeps."""
        for host in self._environment.hosts.values():
            for attempt in host.attempts.values():
                if (attempt.job, attempt.attempt) in self._environment.misreported_runs:
                    continue
                if attempt.alive and host.name.startswith(f"{failed_slice}/"):
                    self._environment.fail(f"{job.id} failed and runs on its kept {host.name}")

    # After the schedule --------------------------------------------------------------------------

    async def jobs_end(self, deadline: float) -> None:
        """Wait for the end of all jobs, and for the answers to all commands.

        The server executes a command before its user has the answer.
        """
        environment = self._environment
        while self._unfinished_jobs() or self._unanswered_requests():
            if environment.now() >= deadline:
                break
            await asyncio.sleep(120.0)
        for job_id, state in self._unfinished_jobs().items():
            environment.fail(f"{job_id} never ended: {state}")
        for job_id, verb in self._unanswered_requests():
            environment.fail(f"{verb} {job_id} was never answered")

    async def cloud_is_empty(self, deadline: float) -> None:
        """Wait until the cloud has no resource of the jobs."""
        while self._deletable() and self._environment.now() < deadline:
            await asyncio.sleep(120.0)
        self.check_at_end()
        self._check_calls()

    def check_at_end(self) -> None:
        """Check the final state of all jobs and of the cloud."""
        for job_id, state in self._unfinished_jobs().items():
            self._environment.fail(f"{job_id} is not over: {state}")
        for name in sorted(self._deletable()):
            self._environment.fail(f"{name} is left in the cloud")
        for name in self._cloud.endless_deletions:
            repeated_at = max(self._cloud.deletes[name][-1], self._server.awake_since)
            if self._server.asleep or f"-{self._server.owner}-" not in name:
                continue
            if self._environment.now() - repeated_at > DELETE_REPEATED:
                self._environment.fail(f"the deletion of {name} is not repeated")
        for job_id, requests in self._user_requests.items():
            self._check_job(job_id, requests)

    def _deletable(self) -> set[str]:
        """Return the resources that the cloud has and would delete."""
        return self._cloud.resources() - set(self._cloud.endless_deletions)

    def _waits_for_deletion(self, job: Job) -> bool:
        """Return True if a job rightly waits for a slice that is never deleted.

        Its program may run there. Only a program that has ended, or is fenced off from its
        checkpoints, does no harm, and a job that shall end waits in any case.
        """
        service = self._server.service
        assert service is not None
        old_slices = {
            name
            for name, deletion in self._cloud.endless_deletions.items()
            if name.startswith(f"dl-{self._server.owner}-{job.id}-") and deletion.contacted
        }
        if not old_slices or job.active is not None:
            return False
        harmful = any(
            not row.program for row in service.store.releasing() if row.name in old_slices
        )
        return harmful or job.wish is not DesiredState.RUN

    def _unfinished_jobs(self) -> dict[str, str]:
        service = self._server.service
        assert service is not None
        return {
            record.job.id: f"{record.job.status}: {record.job.reason}"
            for record in service.supervisor.records.values()
            if not record.job.status.ended and not self._waits_for_deletion(record.job)
        }

    def _unanswered_requests(self) -> list[tuple[str, str]]:
        """Return the job and the verb of each command that has no result yet."""
        return [
            (job_id, request.verb)
            for job_id, requests in self._user_requests.items()
            for request in requests
            if request.done is None
        ]

    def _check_job(self, job_id: str, requests: list[UserRequest]) -> None:
        service, environment = self._server.service, self._environment
        assert service is not None
        record = service.supervisor.record(job_id)
        if record is None:
            if not any(
                w.verb == "clean" and w.outcome in {"answered", "unknown"} for w in requests
            ):
                environment.fail(f"{job_id} is gone, and nobody cleaned it")
            return
        if any(w.verb == "clean" and w.outcome == "answered" for w in requests):
            environment.fail(f"{job_id} was cleaned and is still there")
            return
        job = record.job
        if self._waits_for_deletion(job) and not job.status.ended:
            return
        last = self._last_request(job_id)
        if last and last.verb in {"create", "resume"} and job.status is Status.CANCELLED:
            environment.fail(f"{job_id} was to run and is {job.status}")
        cancelled = last is not None and last.verb in {"cancel", "delete"} and not last.too_late
        if cancelled and job.status is Status.FAILED:
            environment.fail(f"{job_id} was to be cancelled and is {job.status}: {job.reason}")
        if job.reason.startswith("internal error in drumline"):
            environment.fail(f"{job_id} ended: {job.reason}")
        if service.folders.secrets(job_id):
            environment.fail(f"the secrets of {job_id} are still there")
        key = self._key(job_id)
        if any(run[0] == key for run in environment.misreported_runs):
            return  # a host's wrong report decided the outcome
        saved, steps = environment.buckets.get(key), environment.plans[key].steps
        if job.status is Status.SUCCEEDED and (saved is None or saved.saved < steps):
            environment.fail(f"{job_id} succeeded and was not done")
        self._check_counts(job, requests)
        self._check_outputs(job)

    def _check_outputs(self, job: Job) -> None:
        """Check that the outputs of a job are those after the end of its program."""
        service = self._server.service
        assert service is not None
        if job.status is not Status.SUCCEEDED or not job.outputs:
            return
        results = [e["text"] for e in service.store.events(job.id) if e["kind"] == "outputs"]
        if not results:
            self._environment.fail(f"{job.id} succeeded without a word about its outputs")
        elif "took longer than" in results[-1]:
            return  # no poll listed the hosts in time
        record = service.supervisor.outputs.record(job.id)
        if record is None or record.attempt != job.attempts:
            return  # its last slice was lost before the first copy
        interrupted = self._environment.interrupted_slices | set(self._environment.host_faults)
        if service.store.slices(job.id)[-1].name in interrupted:
            return  # the slice or its hosts may have been lost during the last copy
        for index, host in record.hosts.items():
            path = service.folders.outputs(job.id) / f"host-{index}" / OUTPUT
            if not host.error and not path.read_text().endswith("end\n"):
                self._environment.fail(f"{job.id} ended without a copy of its last outputs")

    def _check_counts(self, job: Job, requests: list[UserRequest]) -> None:
        """Check that no more faults of program, hosts and cloud are recorded than occurred."""
        service, environment = self._server.service, self._environment
        assert service is not None
        attempts = service.store.attempts(job.id)
        # The store keeps only the newest slices that were never ready.
        affected = environment.interrupted_slices | set(environment.host_faults)
        slices = {name for name in affected if f"-{job.id}-" in name}
        caused = environment.failures.get(self._key(job.id), 0)
        faults = sum(environment.host_faults[name] for name in slices)
        outcomes = Counter(attempt["outcome"] for attempt in attempts)
        program_faults = sum(outcomes[outcome] for outcome in FAULT_OF_THE_PROGRAM)
        setup = outcomes[EndReason.SETUP_FAILED.value]
        out_of_reach = outcomes[EndReason.UNREACHABLE.value]
        for label, recorded, limit in (
            ("failures of its program", program_faults, caused),
            ("bad hosts and set-ups", outcomes[EndReason.BAD_HOST.value] + setup, faults),
            ("slices out of reach", out_of_reach, faults),
            (
                "preemptions",
                outcomes[EndReason.PREEMPTED.value],
                len(slices & environment.interrupted_slices),
            ),
        ):
            if recorded > limit:
                environment.fail(f"{job.id} has {recorded} {label} on record, and had {limit}")
                for attempt in attempts:
                    environment.note(
                        "attempt", attempt["number"], attempt["outcome"], attempt["detail"]
                    )
        # A program that hangs may be moved to a cheaper slice before it counts as stuck.
        moved = outcomes[EndReason.MOVED.outcome]
        interrupted = faults or moved or slices & environment.interrupted_slices
        undisturbed = not interrupted and len(requests) == 1
        if undisturbed and program_faults < caused:
            environment.fail(f"{job.id} failed {caused} times, and {program_faults} are on record")
        allowed = job.allowance.failures or 0
        # A job ends also after several slices whose hosts could not be reached at all.
        if job.status is Status.FAILED and program_faults + setup <= allowed and not out_of_reach:
            environment.fail(f"{job.id} failed within its allowance: {job.reason}")
        if program_faults + setup > allowed + 1 and not any(
            user_request.verb == "resume" for user_request in requests
        ):
            environment.fail(
                f"{job.id} went on after {program_faults} failures, and was allowed {allowed}"
            )
        if [attempt["number"] for attempt in attempts] != list(range(1, len(attempts) + 1)):
            environment.fail(f"an attempt of {job.id} is not on record")

    def _check_calls(self) -> None:
        request_times, started = self._request_times, self._server.started
        for first, at in enumerate(request_times):
            request_count = sum(other < at + 60.0 for other in request_times[first:])
            # A server may send the requests of one minute at once; every new server has its own
            # limit.
            starts = 1 + sum(at < began_at < at + 60.0 for began_at in started)
            if request_count > REQUESTS_PER_MINUTE * (1 + starts):
                self._environment.fail(f"{request_count} requests were made within a minute")
                return
