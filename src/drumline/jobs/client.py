"""What the command line and Python users call: the job manager's verbs, over the server's socket.

    client = Client()
    job = client.create("job.yaml")
    client.wait([job["id"]])

Synchronous and standard library only, because every command pays for what is imported here. The
first call that needs the server starts it; answers are the server's JSON, as dicts. A mistake (the
user's, or a server that cannot be started) raises `Refused` with a sentence to show.
"""

import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlencode

from drumline.jobs.connection import (
    ANSWER_SECONDS,
    Caller,
    Dropped,
    Json,
    NoServer,
    Refused,
)

if TYPE_CHECKING:
    from drumline.jobs.spec import JobSpec

__all__ = ["Client", "NoServer", "Refused", "job_id"]

JobId = str | int

ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
STOP_SECONDS = 15.0
# The server packs the code before it answers.
PACK_SECONDS = 600.0
LONG_POLL_SECONDS = 20.0


def job_id(typed: JobId) -> str:
    """Six digits from what was typed: 12 and 000012 are the same job."""
    text = str(typed).strip()
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise Refused(f"{text!r} is not a job id; drumline list shows them")
    return f"{int(text):06}"


LONGEST_WORD = 1000
"""The most characters of a search filter."""


class Client:
    """The job manager's verbs. Ids may be given as 12, "12" or "000012"."""

    def __init__(
        self,
        home: Path | None = None,
        autostart: bool = True,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`warn` gets a sentence when the running server is of another version than this client."""
        self._server = Caller(home, autostart, warn)

    @property
    def home(self) -> Path:
        """The home folder of the server that this client calls."""
        return self._server.home

    # What a job is asked to do

    def create(
        self,
        job: "str | Path | Mapping[str, Any] | JobSpec",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        begin_from: JobId | None = None,
    ) -> Json:
        """Create a job from a job file (or its content); secrets come from `environ`.

        With `begin_from`, the new job takes over the checkpoints of a job that has ended.
        """
        spec = _spec(job, overrides)
        secrets = _secrets(spec.secrets, os.environ if environ is None else environ)
        self._server.withheld = frozenset(secrets)
        origin = _origin(job, overrides) or {}
        if begin_from is not None:
            origin["from"] = job_id(begin_from)
        asked: Json = {"spec": spec.model_dump(mode="json"), "secrets": secrets, "user": _user()}
        asked["origin"] = origin or None
        return self._server.ask("POST", "/jobs", asked, timeout=PACK_SECONDS)

    def plan(
        self,
        job: "str | Path | Mapping[str, Any] | JobSpec",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        begin_from: JobId | None = None,
    ) -> list[str]:
        """The lines of `dry_run`."""
        return [*self.dry_run(job, overrides, environ, begin_from)["lines"]]

    def dry_run(
        self,
        job: "str | Path | Mapping[str, Any] | JobSpec",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        begin_from: JobId | None = None,
    ) -> Json:
        """Return `{lines, left_out, left_out_total}`: the plan of `create`."""
        spec = _spec(job, overrides)
        _secrets(spec.secrets, os.environ if environ is None else environ)
        asked: Json = {"spec": spec.model_dump(mode="json")}
        if begin_from is not None:
            asked["origin"] = {"from": job_id(begin_from)}
        return self._server.ask("POST", "/plan", asked, timeout=PACK_SECONDS)

    def resume(
        self,
        job: JobId,
        environ: Mapping[str, str] | None = None,
        file: "str | Path | None" = None,
        overrides: Sequence[str] = (),
    ) -> Json:
        """Start a job again that has ended: `{job, text, changes}`.

        Its job file is read again, or `file` instead; `overrides` are `key=value`. Its secrets were
        deleted, so they are read from `environ` again.
        """
        known = self.show(job)
        spec, origin = self._again(known, file, overrides)
        given = known["spec"] if spec is None else spec.model_dump(mode="json")
        names, values = given.get("secrets") or (), os.environ if environ is None else environ
        asked: Json = {}
        if known["status"] in ENDED:
            asked["secrets"] = _secrets(names, values)
        else:  # a job that is being cancelled may be resumed; for others the server says no
            asked["secrets"] = {name: values[name] for name in names if name in values}
        if spec is not None:
            asked |= {"spec": given, "origin": origin}
        path = f"/jobs/{job_id(job)}/resume"
        answer = self._server.ask("POST", path, asked, timeout=PACK_SECONDS)
        written = (known.get("origin") or {}).get("file")
        if spec is None and written:
            answer["text"] += f"; {written} is not there any more, so it goes on as it was"
        return answer

    def resume_changes(
        self, job: JobId, file: "str | Path | None" = None, overrides: Sequence[str] = ()
    ) -> list[str]:
        """What a resume would change of the job file, a line each; changes nothing."""
        from drumline.jobs.spec import changes

        known = self.show(job)
        spec, _ = self._again(known, file, overrides)
        return [] if spec is None else changes(known["spec"], spec.model_dump(mode="json"))

    def _again(
        self, known: Json, file: "str | Path | None", overrides: Sequence[str]
    ) -> "tuple[JobSpec | None, Json | None]":
        """The current job file, None where the stored one is to be used, and its origin."""
        from drumline.jobs.spec import amend

        if file is not None:
            return _spec(file, overrides), _origin(file, overrides)
        origin = known.get("origin") or {}
        sets = [*(origin.get("overrides") or ()), *overrides]
        if origin.get("file") and Path(origin["file"]).exists():
            return _spec(origin["file"], sets), _origin(origin["file"], sets)
        if overrides:
            return amend(known["spec"], overrides), {"overrides": sets}
        return None, None

    def cancel(self, jobs: JobId | Iterable[JobId]) -> list[Json]:
        """End the programs and keep the slices; each answer is `{job, text}`."""
        return [self._server.ask("POST", f"/jobs/{job}/cancel") for job in _ids(jobs)]

    def delete(self, jobs: JobId | Iterable[JobId]) -> list[Json]:
        """End the programs and release the slices; each answer is `{job, text}`."""
        return [self._server.ask("POST", f"/jobs/{job}/delete") for job in _ids(jobs)]

    def clean(self, jobs: JobId | Iterable[JobId]) -> list[Json]:
        """Delete, and remove logs and record; each answer is `{job, text}`."""
        # The answer comes when all of it is gone, which takes as long as the program's shutdown.
        return [self._server.ask("POST", f"/jobs/{job}/clean", timeout=None) for job in _ids(jobs)]

    def exec(
        self,
        job: JobId,
        command: str | Sequence[str],
        host: int | str = 0,
        stdin: BinaryIO | None = None,
    ) -> list[Json]:
        """Run a command on one host, or on `"all"`: a `{host, exit_code, stdout, stderr}` each.

        Its input is `stdin` (a file with a descriptor). A negative exit code is a signal; None,
        with an `error`, is a host that was lost meanwhile.
        """
        written: dict[tuple[int, str], bytearray] = {}
        ended = {}
        for frame in self.exec_frames(job, command, host, stdin):
            if "data" in frame:
                written.setdefault((frame["host"], frame["stream"]), bytearray()).extend(
                    frame["data"]
                )
            elif "exit_code" in frame:
                ended[frame["host"]] = frame
        for index, end in ended.items():
            for stream in ("stdout", "stderr"):
                end[stream] = written.get((index, stream), b"").decode("utf-8", "replace")
        return [ended[index] for index in sorted(ended)]

    def exec_frames(
        self,
        job: JobId,
        command: str | Sequence[str],
        host: int | str = 0,
        stdin: BinaryIO | None = None,
    ) -> Generator[Json, None, None]:
        """Run a command like `exec`, and yield frames as it runs; closing this ends the command.

        First comes `{hosts}`, then `{host, stream, data}` for each piece of bytes that is written
        to "stdout" or "stderr", and `{host, exit_code}` when it has ended on a host.
        """
        import base64

        asked = {"host": host, "command": command if isinstance(command, str) else list(command)}
        going: set[int] | None = None
        try:
            for frame in self._server.exchange(f"/jobs/{job_id(job)}/exec", asked, stdin):
                if "hosts" in frame:
                    going = set(frame["hosts"])
                elif "data" in frame:
                    frame["data"] = base64.b64decode(frame["data"])
                elif going is not None:
                    going.discard(frame["host"])
                yield frame
        except Dropped as gone:
            raise Refused(f"{gone}; the command is ended with it") from gone
        if going is None or going:
            raise Refused("the server went away before the command had ended")

    def show(self, job: JobId) -> Json:
        """Everything about one job."""
        return self._server.ask("GET", f"/jobs/{job_id(job)}")

    def history(self, job: JobId) -> Json:
        """`{job, attempts, points, steps_again}`: the program's metrics over its steps."""
        return self._server.ask("GET", f"/jobs/{job_id(job)}/history")

    def events(self, job: JobId, after: int = 0, wait: float = 0.0) -> Json:
        """`{events, job}`: what happened after event `after`; waits up to `wait` seconds for it."""
        query = urlencode({"after": after, "wait": wait})
        path = f"/jobs/{job_id(job)}/events?{query}"
        return self._server.ask("GET", path, timeout=ANSWER_SECONDS + wait)

    def hosts(self, job: JobId) -> list[Json]:
        """Where the hosts of the job's slice are, and how to log in to them."""
        answer: Any = self._server.ask("GET", f"/jobs/{job_id(job)}/hosts")
        return list(answer)

    def wait(self, jobs: JobId | Iterable[JobId], timeout: float | None = None) -> dict[str, str]:
        """Wait until all have ended, or for `timeout` seconds; returns each job's status."""
        deadline = None if timeout is None else time.monotonic() + timeout
        statuses = {}
        for job in _ids(jobs):
            after, patience = 0, 0.0
            while True:
                answer = self.events(job, after, patience)
                statuses[job] = str(answer["job"]["status"])
                after = max([after, *(int(event["id"]) for event in answer["events"])])
                left = LONG_POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if statuses[job] in ENDED or left <= 0:
                    break
                patience = min(left, LONG_POLL_SECONDS)
        return statuses

    def logs(
        self,
        job: JobId,
        host: int | str | None = None,
        attempt: int | str | None = None,
        follow: bool = False,
        *,
        tail: int | None = None,
        since: float | None = None,
        times: bool = False,
        as_json: bool = False,
    ) -> Iterator[bytes]:
        """The program's output as it was written; with `follow`, on and on until the job ends.

        `attempt` is a number or `"all"`, else the last; `tail` asks for the last lines, `since`
        for what was written from a time on; with `times`, each line begins with its time; with
        `as_json`, each is an object `{attempt, host, time, text}`.
        """
        asked = {
            "host": host,
            "attempt": attempt,
            "follow": 1 if follow else None,
            "tail": tail,
            "since": since,
            "times": 1 if times else None,
            "json": 1 if as_json else None,
        }
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        path = f"/jobs/{job_id(job)}/logs" + (f"?{query}" if query else "")
        started = False
        while True:
            try:
                for piece in self._server.stream(path):
                    started = True
                    yield piece
                return
            except (ConnectionRefusedError, FileNotFoundError):
                self._server.start()
            except Dropped as gone:
                # The next server could not continue where this one stopped: hosts alternate in the
                # stream, and an attempt may have ended. So the caller gets an error.
                if started:
                    raise Refused(f"{gone}; ask for them again") from gone

    def strays(self) -> Json:
        """`{strays, not_seen}`: slices of databases this home had, and zones not polled."""
        return self._server.ask("GET", "/strays", timeout=PACK_SECONDS)

    def settle_strays(self, verb: str, names: Sequence[str] = ()) -> list[str]:
        """`release` or `adopt` stray slices, all where none is named; a line for each."""
        asked = {"names": [*names], "user": _user()}
        answer = self._server.ask("POST", f"/strays/{verb}", asked, timeout=PACK_SECONDS)
        return [str(line) for line in answer["text"]]

    def known_hosts(self) -> list[Json]:
        """The hosts that jobs have met, the least trusted first."""
        answer: Any = self._server.ask("GET", "/hosts")
        return [*answer]

    def known_host(self, identity: str) -> Json:
        """One host that jobs have met, with all that speaks against it."""
        return self._server.ask("GET", f"/hosts?{urlencode({'identity': identity})}")

    def exclude_host(self, identity: str, why: str = "", seconds: float | None = None) -> Json:
        """Refuse a host, for so long or until it is forgiven."""
        body = {"identity": identity, "why": why, "seconds": seconds}
        return self._server.ask("POST", "/hosts/exclude", body)

    def forgive_host(self, identity: str) -> Json:
        """Hold nothing against a host any longer."""
        return self._server.ask("POST", "/hosts/forgive", {"identity": identity})

    def server_status(self) -> Json | None:
        """`{pid, version, home, cloud, jobs, started}`, or None where no server runs."""
        try:
            return self._server.once("GET", "/status")
        except (ConnectionRefusedError, FileNotFoundError, Dropped):
            return None

    def stop_server(self) -> bool:
        """Stop the server and wait until it has closed its files; False where none ran."""
        try:
            self._server.once("POST", "/stop")
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except Dropped:
            pass  # it may close the connection before the answer is sent
        self._until_it_is(lambda: not self._server.listens())
        # If a server listens again it is the next one, started after this one was gone.
        self._until_it_is(lambda: self._server.vacant() or self._server.listens())
        return True

    def _until_it_is(self, stopped: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        while not stopped():
            if time.monotonic() > deadline:
                raise Refused(
                    f"the server did not stop within {STOP_SECONDS:.0f} s; see {self._server.log}"
                )
            time.sleep(0.02)

    def list(
        self,
        all: bool = False,  # noqa: A002 - the verb and its option
        status: Sequence[str] = (),
        name: str | None = None,
        user: str | None = None,
        limit: int | None = None,
        before: JobId | None = None,
    ) -> "list[Json]":
        # Defined last of the verbs: from here on, `list` in a signature would mean this method.
        """A summary of each job that matches, oldest first.

        Without `all`, a `status` or `before`, those that ended over a day ago are left out. `name`
        is part of a name, or a pattern with * and ?. `limit` is the number of newest jobs, and
        `before` lists those older than a job: the first of a page is the `before` of the next.
        Without a limit, all that have not ended are listed, and the newest 1,000 of the others.
        """
        older = None if before is None else job_id(before)
        for text in (name, user, *status):
            if text and len(text) > LONGEST_WORD:
                raise Refused(f"{text[:40]}… is longer than any name, user or status")
        asked = {"all": 1 if all else None, "name": name, "user": user}
        asked |= {"limit": limit, "before": older, "status": ",".join(status) or None}
        query = urlencode({key: value for key, value in asked.items() if value is not None})
        answer: Any = self._server.ask("GET", f"/jobs?{query}" if query else "/jobs")
        return [*answer]


def _ids(jobs: JobId | Iterable[JobId]) -> tuple[str, ...]:
    """All ids, checked before the first is acted on: a typo in the last changes nothing."""
    several = (jobs,) if isinstance(jobs, str | int) else jobs
    return tuple(dict.fromkeys(job_id(typed) for typed in several))


def _spec(job: "str | Path | Mapping[str, Any] | JobSpec", overrides: Sequence[str]) -> "JobSpec":
    from drumline.jobs.spec import JobSpec, load, validate

    if isinstance(job, JobSpec):
        return job
    if isinstance(job, Mapping):
        return validate(job)
    return load(Path(job), overrides)


def _origin(
    job: "str | Path | Mapping[str, Any] | JobSpec", overrides: Sequence[str]
) -> Json | None:
    """Where a job comes from, for a later resume."""
    if not isinstance(job, str | Path):
        return None
    return {"file": str(Path(job).absolute()), "overrides": [*overrides]}


def _secrets(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    missing = [name for name in names if name not in environ]
    if missing:
        raise Refused(
            f"secrets: {', '.join(missing)} not set in this environment; export "
            f"{'it' if len(missing) == 1 else 'them'} and try again"
        )
    return {name: environ[name] for name in names}


def _user() -> str:
    import getpass

    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a user id that has no name
        return str(os.getuid())
