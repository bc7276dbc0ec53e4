"""The client of the job manager, for the command line and for Python users.

    client = Client()
    job = client.create("job.yaml")
    client.wait([job["id"]])

The first call starts the server if none runs. Results are the server's JSON, as dicts. An error of
the user, or a server that cannot be started, raises `Refused` with a message to display. The client
is synchronous and imports only the standard library, because every command loads it.
"""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlencode

from drumline.jobs.connection import (
    RESPONSE_SECONDS,
    STOP,
    Json,
    LargeCode,
    NoServer,
    Refused,
    ServerConnection,
    ServerDisconnected,
)

if TYPE_CHECKING:
    from threading import Event

    from drumline.jobs.spec import JobSpec

__all__ = ["Client", "CommandInterrupted", "LargeCode", "NoServer", "Refused", "job_id"]

JobId = str | int
OnPacking = Callable[[int, int], None]
"""An id, or the name of exactly one job."""

FINAL_STATUSES = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})
STOP_SECONDS = 15.0
# The server packs the code before it responds.
PACK_SECONDS = 600.0
PROGRESS_SECONDS = 1.0
CANCEL_SECONDS, CANCEL_POLL_SECONDS = 5.0, 0.05
LONG_POLL_SECONDS = 20.0


class CommandInterrupted(KeyboardInterrupt):
    """Ctrl-C while the server packed code. The text says if the request was executed."""


def job_id(typed: JobId) -> str | None:
    """Return the six digits of a job id, or None for a name. 12 and 000012 are the same job."""
    text = str(typed).strip()
    if isinstance(typed, str) and not (text.isascii() and text.isdigit()):
        return None
    if len(text) > MAX_FILTER_LENGTH or int(text) < 1:
        raise Refused(f"{text[:40]!r} is not a job id; drumline list shows them")
    return f"{int(text):06}"


MAX_FILTER_LENGTH = 1000
"""The most characters of a search filter."""


class Client:
    """The commands of the job manager as methods.

    A job is given by its id, as 12, "12" or "000012", or by its name if only one job has it.
    """

    def __init__(
        self,
        home: Path | None = None,
        autostart: bool = True,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`warn` is called with a message if the running server has another version."""
        self._server = ServerConnection(home, autostart, warn)

    @property
    def home(self) -> Path:
        """The home folder of the server that this client calls."""
        return self._server.home

    # --- Commands on jobs -------------------------------------------------------------------

    def ids(self, jobs: JobId | Iterable[JobId]) -> tuple[str, ...]:
        """Return the ids of jobs that are given by id or name, each once.

        A number is an id. All names are looked up in one call before a command changes anything.
        """
        typed = (jobs,) if isinstance(jobs, str | int) else tuple(jobs)
        ids = [job_id(job) for job in typed]
        names = [str(job) for job, known_id in zip(typed, ids, strict=True) if known_id is None]
        for name in names:
            if not name.strip() or not name.isprintable() or len(name) > MAX_FILTER_LENGTH:
                raise Refused(f"{name[:40]!r} is no id or name of a job; drumline list shows them")
        if names:
            query = urlencode({"name": names}, doseq=True)
            named: Any = iter(self._server.call("GET", f"/ids?{query}"))
            ids = [next(named) if known_id is None else known_id for known_id in ids]
        return tuple(dict.fromkeys(map(str, ids)))

    def _id(self, job: JobId) -> str:
        [job_id] = self.ids(job)
        return job_id

    def create(
        self,
        job: "str | Path | Mapping[str, Any] | JobSpec",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        begin_from: JobId | None = None,
        *,
        allow_large: bool = False,
        on_packing: OnPacking | None = None,
    ) -> Json:
        """Create a job from a job file or its content. Secrets come from `environ`.

        With `begin_from`, the new job continues from the checkpoints of a finished job. Code of
        over 100 MB, or with a file of over 50 MB, raises LargeCode without `allow_large`.
        `on_packing` is called with the packed bytes and their total while the code is packed.
        """
        spec = _spec(job, overrides)
        secrets = _secrets(spec.secrets, os.environ if environ is None else environ)
        self._server.withheld = frozenset(secrets)
        origin = _origin(job, overrides) or {}
        if begin_from is not None:
            origin["from"] = self._id(begin_from)
        body: Json = {"spec": spec.model_dump(mode="json"), "secrets": secrets, "user": _user()}
        body |= {"origin": origin or None, "interpreter": sys.executable or None}
        body["allow_large"] = allow_large
        return self._call_packing("/jobs", body, on_packing)

    def _call_packing(self, path: str, body: Json, on_packing: OnPacking | None) -> Json:
        """Send a call that packs code, and report the progress until it is answered."""
        if on_packing is None:
            return self._server.call("POST", path, body, timeout=PACK_SECONDS)
        from threading import Event, Thread

        body = {**body, "packing": os.urandom(16).hex()}
        results: list[Json | BaseException] = []

        def send() -> None:
            try:
                results.append(self._server.call("POST", path, body, timeout=PACK_SECONDS))
            except BaseException as error:
                results.append(error)
            answered.set()

        # Not waited for at the end of this process: Ctrl-C ends the command at once.
        # An event, because Python 3.11 takes a thread for ended once Ctrl-C interrupts its `join`.
        answered = Event()
        Thread(target=send, daemon=True).start()
        monitor = ServerConnection(self.home, autostart=False)
        try:
            while not answered.wait(PROGRESS_SECONDS):
                with suppress(Refused, OSError, ServerDisconnected):
                    progress = monitor.call_running("GET", f"/packing/{body['packing']}")
                    on_packing(progress["bytes"], progress["total"])
        except KeyboardInterrupt:
            _cancel_packing(monitor, body["packing"], answered)
            raise CommandInterrupted(_interruption(results)) from None
        [result] = results
        if isinstance(result, BaseException):
            raise result
        return result

    def plan(
        self,
        job: "str | Path | Mapping[str, Any] | JobSpec",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        begin_from: JobId | None = None,
    ) -> list[str]:
        """Return the lines of `dry_run`."""
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
        body: Json = {"spec": spec.model_dump(mode="json")}
        if begin_from is not None:
            body["origin"] = {"from": self._id(begin_from)}
        return self._server.call("POST", "/plan", body, timeout=PACK_SECONDS)

    def resume(
        self,
        job: JobId,
        environ: Mapping[str, str] | None = None,
        file: "str | Path | None" = None,
        overrides: Sequence[str] = (),
        *,
        allow_large: bool = False,
        on_packing: OnPacking | None = None,
    ) -> Json:
        """Rerun a finished job. Return `{job, text, changes}`.

        The server rereads its job file, or reads `file` instead. `overrides` are `key=value`. Its
        secrets were deleted, so they are reread from `environ`. `allow_large` and `on_packing`
        are as for `create`; code that was large before needs no `allow_large`.
        """
        current = self.show(job)
        spec, origin = self._spec_for_resume(current, file, overrides)
        document = current["spec"] if spec is None else spec.model_dump(mode="json")
        names, values = document.get("secrets") or (), os.environ if environ is None else environ
        body: Json = {"interpreter": sys.executable or None, "allow_large": allow_large}
        if current["status"] in FINAL_STATUSES:
            body["secrets"] = _secrets(names, values)
        else:  # a job that is being cancelled may be resumed; the server refuses all others
            body["secrets"] = {name: values[name] for name in names if name in values}
        if spec is not None:
            body |= {"spec": document, "origin": origin}
        path = f"/jobs/{self._id(job)}/resume"
        response = self._call_packing(path, body, on_packing)
        job_file = (current.get("origin") or {}).get("file")
        if spec is None and job_file:
            response["text"] += f"; {job_file} no longer exists, so the job file is unchanged"
        return response

    def resume_changes(
        self, job: JobId, file: "str | Path | None" = None, overrides: Sequence[str] = ()
    ) -> list[str]:
        """Return the changes of the job file that a resume would make, one line each."""
        from drumline.jobs.spec import changes

        current = self.show(job)
        spec, _ = self._spec_for_resume(current, file, overrides)
        return [] if spec is None else changes(current["spec"], spec.model_dump(mode="json"))

    def _spec_for_resume(
        self, current: Json, file: "str | Path | None", overrides: Sequence[str]
    ) -> "tuple[JobSpec | None, Json | None]":
        """Return the new job file, or None for the stored one, and its origin."""
        from drumline.jobs.spec import amend

        if file is not None:
            return _spec(file, overrides), _origin(file, overrides)
        origin = current.get("origin") or {}
        sets = [*(origin.get("overrides") or ()), *overrides]
        if origin.get("file") and Path(origin["file"]).exists():
            return _spec(origin["file"], sets), _origin(origin["file"], sets)
        if overrides:
            return amend(current["spec"], overrides), {"overrides": sets}
        return None, None

    def cancel(self, jobs: JobId | Iterable[JobId]) -> list[Json]:
        """Stop the programs and keep the slices. Return `{job, text}` for each job."""
        return [self._server.call("POST", f"/jobs/{job}/cancel") for job in self.ids(jobs)]

    def delete(self, jobs: JobId | Iterable[JobId]) -> list[Json]:
        """Stop the programs and release the slices. Return `{job, text}` for each job."""
        return [self._server.call("POST", f"/jobs/{job}/delete") for job in self.ids(jobs)]

    def clean(self, jobs: JobId | Iterable[JobId], outputs: bool = False) -> list[Json]:
        """Delete the jobs with their logs and records. Return `{job, text}` for each job.

        Their outputs stay, except with `outputs`.
        """
        # The server responds after the shutdown of the program, once everything is deleted.
        return [
            self._server.call("POST", f"/jobs/{job}/clean", {"outputs": outputs}, timeout=None)
            for job in self.ids(jobs)
        ]

    def exec(
        self,
        job: JobId,
        command: str | Sequence[str],
        host: int | str = 0,
        stdin: BinaryIO | None = None,
    ) -> list[Json]:
        """Run a command on one host or on `"all"`. Return `{host, exit_code, stdout, stderr}` each.

        Its input is `stdin` (a file with a descriptor). A negative exit code is a signal. A host
        that became unreachable in the meantime has the exit code None and an `error`.
        """
        output: dict[tuple[int, str], bytearray] = {}
        results = {}
        for frame in self.exec_frames(job, command, host, stdin):
            if "data" in frame:
                output.setdefault((frame["host"], frame["stream"]), bytearray()).extend(
                    frame["data"]
                )
            elif "exit_code" in frame:
                results[frame["host"]] = frame
        for index, result in results.items():
            for stream in ("stdout", "stderr"):
                result[stream] = output.get((index, stream), b"").decode("utf-8", "replace")
        return [results[index] for index in sorted(results)]

    def exec_frames(
        self,
        job: JobId,
        command: str | Sequence[str],
        host: int | str = 0,
        stdin: BinaryIO | None = None,
    ) -> Generator[Json, None, None]:
        """Run a command like `exec` and yield frames as it runs. Closing this ends the command.

        The first frame is `{hosts}`. Then come `{host, stream, data}` for bytes that the command
        writes to "stdout" or "stderr", and `{host, exit_code}` when it has exited on a host.
        """
        import base64

        body = {"host": host, "command": command if isinstance(command, str) else list(command)}
        running: set[int] | None = None
        try:
            for frame in self._server.exchange(f"/jobs/{self._id(job)}/exec", body, stdin):
                if "hosts" in frame:
                    running = set(frame["hosts"])
                elif "data" in frame:
                    frame["data"] = base64.b64decode(frame["data"])
                elif running is not None:
                    running.discard(frame["host"])
                yield frame
        except ServerDisconnected as error:
            raise Refused(f"{error}; this also stopped the command") from error
        if running is None or running:
            raise Refused("the server exited before the end of the command")

    def show(self, job: JobId) -> Json:
        """Return everything about one job."""
        return self._server.call("GET", f"/jobs/{self._id(job)}")

    def history(self, job: JobId) -> Json:
        """Return `{job, attempts, points, steps_again}`: the program's metrics over its steps."""
        return self._server.call("GET", f"/jobs/{self._id(job)}/history")

    def events(self, job: JobId, after: int = 0, wait: float = 0.0) -> Json:
        """Return `{events, job}` after event `after`. Wait up to `wait` seconds for an event."""
        query = urlencode({"after": after, "wait": wait})
        path = f"/jobs/{self._id(job)}/events?{query}"
        return self._server.call("GET", path, timeout=RESPONSE_SECONDS + wait)

    def hosts(self, job: JobId) -> list[Json]:
        """Return the addresses of the job's hosts, and the ssh commands to log in."""
        hosts: Any = self._server.call("GET", f"/jobs/{self._id(job)}/hosts")
        return list(hosts)

    def wait(self, jobs: JobId | Iterable[JobId], timeout: float | None = None) -> dict[str, str]:
        """Wait until all jobs have finished, or for `timeout` seconds. Return a status per job."""
        deadline = None if timeout is None else time.monotonic() + timeout
        statuses = {}
        for job in self.ids(jobs):
            after, wait_seconds = 0, 0.0
            while True:
                response = self.events(job, after, wait_seconds)
                statuses[job] = str(response["job"]["status"])
                after = max([after, *(int(event["id"]) for event in response["events"])])
                left = LONG_POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if statuses[job] in FINAL_STATUSES or left <= 0:
                    break
                wait_seconds = min(left, LONG_POLL_SECONDS)
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
        """Yield the program's output as it was written. With `follow`, continue until the job ends.

        `attempt` is a number or `"all"`; the default is the last one with output. `tail` is a
        number of lines from the end. `since` is the timestamp of the first line. With `times`, each
        line begins with its timestamp. With `as_json`, lines are objects with `attempt`, `host`,
        `time` and `text`.
        """
        parameters = {
            "host": host,
            "attempt": attempt,
            "follow": 1 if follow else None,
            "tail": tail,
            "since": since,
            "times": 1 if times else None,
            "json": 1 if as_json else None,
        }
        query = urlencode({k: value for k, value in parameters.items() if value is not None})
        path = f"/jobs/{self._id(job)}/logs" + (f"?{query}" if query else "")
        started = False
        while True:
            try:
                for data in self._server.stream(path):
                    started = True
                    yield data
                return
            except (ConnectionRefusedError, FileNotFoundError):
                self._server.start()
            except ServerDisconnected as error:
                # The next server cannot continue at the same position: hosts alternate in the
                # stream, and an attempt may be over. So the caller gets an error.
                if started:
                    raise Refused(f"{error}; repeat the command") from error

    def strays(self) -> Json:
        """Return `{strays, not_seen}`: slices of lost databases, and zones not polled."""
        return self._server.call("GET", "/strays", timeout=PACK_SECONDS)

    def settle_strays(self, verb: str, names: Sequence[str] = ()) -> list[str]:
        """`release` or `adopt` orphans, all if no name is given. Return a line for each."""
        body = {"names": [*names], "user": _user()}
        response = self._server.call("POST", f"/strays/{verb}", body, timeout=PACK_SECONDS)
        return [str(line) for line in response["text"]]

    def known_hosts(self) -> list[Json]:
        """Return the hosts that jobs have used, in ascending order of trust."""
        hosts: Any = self._server.call("GET", "/hosts")
        return [*hosts]

    def known_host(self, identity: str) -> Json:
        """Return one host that jobs were given, with the evidence against it."""
        return self._server.call("GET", f"/hosts?{urlencode({'identity': identity})}")

    def exclude_host(self, identity: str, why: str = "", seconds: float | None = None) -> Json:
        """Exclude a host, for a number of seconds or until it is forgiven."""
        body = {"identity": identity, "why": why, "seconds": seconds}
        return self._server.call("POST", "/hosts/exclude", body)

    def forgive_host(self, identity: str) -> Json:
        """Remove all evidence against a host."""
        return self._server.call("POST", "/hosts/forgive", {"identity": identity})

    def server_status(self) -> Json | None:
        """Return `{pid, version, home, cloud, jobs, started}`, or None if no server runs."""
        try:
            return self._server.call_running("GET", "/status")
        except (ConnectionRefusedError, FileNotFoundError, ServerDisconnected):
            return None

    def stop_server(self) -> bool:
        """Stop the server and wait until it has closed its files. Return False if none ran."""
        try:
            self._server.call_running("POST", STOP)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except ServerDisconnected:
            pass  # the server may exit before it sends the response
        self._wait_for_stop(lambda: not self._server.server_listens())
        # A server that listens again is the next one, which started after this one had exited.
        self._wait_for_stop(lambda: self._server.is_unlocked() or self._server.server_listens())
        return True

    def _wait_for_stop(self, stopped: Callable[[], bool]) -> None:
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
        # The last method, because `list` in a later signature would mean this method.
        """Return a summary of each job that matches, oldest first.

        Without `all`, a `status` or `before`, jobs that finished over a day ago are omitted. `name`
        is part of a name, or a pattern with * and ?. `limit` is the number of newest jobs. `before`
        lists jobs older than a given one: the first of a page is the `before` of the next page.
        Without a limit, the list has all active jobs and the newest 1,000 of the others.
        """
        older = None if before is None else self._id(before)
        for text in (name, user, *status):
            if text and len(text) > MAX_FILTER_LENGTH:
                raise Refused(f"{text[:40]}… is longer than any name, user or status")
        parameters = {"all": 1 if all else None, "name": name, "user": user}
        parameters |= {"limit": limit, "before": older, "status": ",".join(status) or None}
        query = urlencode({key: value for key, value in parameters.items() if value is not None})
        jobs: Any = self._server.call("GET", f"/jobs?{query}" if query else "/jobs")
        return [*jobs]


def _cancel_packing(server: ServerConnection, token: str, answered: "Event") -> None:
    """Cancel a request that packs code, and wait a few seconds until it is answered.

    A server that is starting has not received the request yet.
    """
    deadline = time.monotonic() + CANCEL_SECONDS
    while time.monotonic() < deadline:
        with suppress(Refused, OSError, ServerDisconnected):
            server.call_running("POST", f"/packing/{token}/cancel", timeout=CANCEL_SECONDS)
            break
        if answered.wait(CANCEL_POLL_SECONDS):
            return
    answered.wait(deadline - time.monotonic())


def _interruption(results: "Sequence[Json | BaseException]") -> str:
    """Return the message after Ctrl-C, from the answer of a request that packs code."""
    message = "the command was interrupted"
    match [*results]:
        case [Refused() as error]:  # usually because the server has cancelled it
            return str(error)
        case [{"text": text}]:
            return f"{message}, but {text}"
        case [{"id": job}]:
            return f"{message}, but {job} was created already; drumline delete {job} stops it"
    return f"{message}; drumline list shows whether the request was executed"


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
    """Return the file and the overrides of a job, for a later resume."""
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
    except (KeyError, OSError):  # in a container, the user id may have no name
        return str(os.getuid())
