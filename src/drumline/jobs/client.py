"""What the command line and Python users call: the job manager's verbs, over the server's socket.

    client = Client()
    job = client.create("job.yaml")
    client.wait([job["id"]])

Synchronous and made of the standard library alone, because every command pays for what is imported
here. The first call that needs the server starts it; answers are the server's JSON, as dicts.
A mistake (the user's, or a server that cannot be had) raises `Refused` with a sentence to show.
"""

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlencode

from drumline import __version__

# http.client and subprocess are the larger part of what this module needs, so they wait until used.
if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse
    from subprocess import Popen

    from drumline.jobs.spec import JobSpec

Json = dict[str, Any]
JobId = str | int

ENDED = frozenset({"SUCCEEDED", "FAILED", "CANCELLED"})

SERVER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "drumline.jobs.server")
# A cold start of the server imports its web and SSH libraries: under 1 s here, several on a laptop
# that has just woken up.
START_SECONDS = 15.0
STOP_SECONDS = 15.0
# Far above any healthy answer; below it a busy disk or a slow bucket lookup must not look dead.
ANSWER_SECONDS = 60.0
# The server packs the code before it answers.
PACK_SECONDS = 600.0
LONG_POLL_SECONDS = 20.0
# sun_path holds 108 bytes on Linux and 104 on macOS, the closing zero included.
LONGEST_SOCKET = 103

# The server outlives the command, and what it starts (an emulated host, say) inherits from it. So
# it gets what it works with, and not every token exported in the shell that happened to come first.
_KEPT = (
    r"PATH|HOME|USER|LOGNAME|SHELL|LANG|LANGUAGE|TZ|TMPDIR|VIRTUAL_ENV|LD_LIBRARY_PATH"
    r"|(HTTPS?|NO)_PROXY|(https?|no)_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
    r"|NO_GCE_CHECK|STORAGE_EMULATOR_HOST"
    r"|(DRUMLINE_|GOOGLE_|GCE_|CLOUDSDK_|LC_|XDG_|PYTHON|COVERAGE_).*"
)


class Refused(ValueError):
    """What was asked for cannot be done; the text says why and what to do."""


class NoServer(Refused):
    """No server runs here, and none was or could be started."""


class _Dropped(Exception):
    """The server went away between the question and the end of its answer."""


def home_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the state is kept: `$DRUMLINE_HOME`, or `~/.drumline`."""
    named = environ.get("DRUMLINE_HOME")
    return Path(named).expanduser().absolute() if named else Path.home() / ".drumline"


def job_id(typed: JobId) -> str:
    """Six digits from what was typed: 12 and 000012 are the same job."""
    text = str(typed).strip()
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise Refused(f"{text!r} is not a job id; drumline list shows them")
    return f"{int(text):06}"


class Client:
    """The job manager's verbs. Ids may be given as 12, "12" or "000012"."""

    def __init__(
        self,
        home: Path | None = None,
        autostart: bool = True,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """`warn` gets a sentence when the running server is of another version than this client."""
        self.home = home_folder() if home is None else Path(home).absolute()
        self.socket = self.home / "server.sock"
        self._autostart = autostart
        self._warn = warn
        self._withheld: frozenset[str] = frozenset()
        if len(os.fsencode(self.socket)) > LONGEST_SOCKET:
            raise Refused(
                f"{self.home} is too long a path for a Unix socket (at most "
                f"{LONGEST_SOCKET - len('/server.sock')} bytes); set DRUMLINE_HOME to a shorter one"
            )

    # What a job is asked to do

    def create(
        self,
        job: "str | Path | Mapping[str, Any] | JobSpec",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> Json:
        """Hand over a job file (or its content) and return the job; secrets come from `environ`."""
        spec = _spec(job, overrides)
        secrets = _secrets(spec.secrets, os.environ if environ is None else environ)
        self._withheld = frozenset(secrets)
        asked = {"spec": spec.model_dump(mode="json"), "secrets": secrets, "user": _user()}
        return self._ask("POST", "/jobs", asked, timeout=PACK_SECONDS)

    def plan(
        self,
        job: "str | Path | Mapping[str, Any] | JobSpec",
        overrides: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> list[str]:
        """What `create` would do, a line each; changes nothing."""
        spec = _spec(job, overrides)
        _secrets(spec.secrets, os.environ if environ is None else environ)
        answer = self._ask(
            "POST", "/plan", {"spec": spec.model_dump(mode="json")}, timeout=PACK_SECONDS
        )
        return [str(line) for line in answer["lines"]]

    def resume(self, job: JobId, environ: Mapping[str, str] | None = None) -> Json:
        """Start a job again that has ended; its secrets were forgotten, so `environ` has them."""
        known = self.show(job)
        asked = {}
        if known["status"] in ENDED:
            names = known["spec"].get("secrets") or ()
            asked["secrets"] = _secrets(names, os.environ if environ is None else environ)
        return self._ask("POST", f"/jobs/{job_id(job)}/resume", asked)

    def cancel(self, jobs: JobId | Iterable[JobId]) -> list[Json]:
        """End the programs and keep the slices; each answer is `{job, text}`."""
        return [self._ask("POST", f"/jobs/{one}/cancel") for one in _ids(jobs)]

    def delete(self, jobs: JobId | Iterable[JobId]) -> list[Json]:
        """End the programs and release the slices; each answer is `{job, text}`."""
        return [self._ask("POST", f"/jobs/{one}/delete") for one in _ids(jobs)]

    def clean(self, jobs: JobId | Iterable[JobId]) -> list[Json]:
        """Delete, and remove logs and record; each answer is `{job, text}`."""
        # The answer comes when all of it is gone, which takes as long as the program's last words.
        return [self._ask("POST", f"/jobs/{one}/clean", timeout=None) for one in _ids(jobs)]

    def exec(self, job: JobId, command: str | Sequence[str], host: int | str = 0) -> list[Json]:
        """Run a command on one host, or on `"all"`: a `{host, exit_code, stdout, stderr}` each."""
        asked = {"host": host, "command": command if isinstance(command, str) else list(command)}
        answer = self._ask("POST", f"/jobs/{job_id(job)}/exec", asked, timeout=None)
        return list(answer["results"])

    # What is known of jobs

    def show(self, job: JobId) -> Json:
        """Everything about one job."""
        return self._ask("GET", f"/jobs/{job_id(job)}")

    def events(self, job: JobId, after: int = 0, wait: float = 0.0) -> Json:
        """`{events, job}`: what happened after event `after`; waits up to `wait` seconds for it."""
        query = urlencode({"after": after, "wait": wait})
        path = f"/jobs/{job_id(job)}/events?{query}"
        return self._ask("GET", path, timeout=ANSWER_SECONDS + wait)

    def hosts(self, job: JobId) -> list[Json]:
        """Where the hosts of the job's slice are, and how to log in to them."""
        answer: Any = self._ask("GET", f"/jobs/{job_id(job)}/hosts")
        return list(answer)

    def wait(self, jobs: JobId | Iterable[JobId], timeout: float | None = None) -> dict[str, str]:
        """Wait until all have ended, or for `timeout` seconds; returns each job's status."""
        deadline = None if timeout is None else time.monotonic() + timeout
        statuses = {}
        for one in _ids(jobs):
            after, patience = 0, 0.0
            while True:
                answer = self.events(one, after, patience)
                statuses[one] = str(answer["job"]["status"])
                after = max([after, *(int(event["id"]) for event in answer["events"])])
                left = LONG_POLL_SECONDS if deadline is None else deadline - time.monotonic()
                if statuses[one] in ENDED or left <= 0:
                    break
                patience = min(left, LONG_POLL_SECONDS)
        return statuses

    def logs(
        self,
        job: JobId,
        host: int | str | None = None,
        attempt: int | None = None,
        follow: bool = False,
    ) -> Iterator[bytes]:
        """The program's output as it was written; with `follow`, on and on until the job ends."""
        asked = {"host": host, "attempt": attempt, "follow": 1 if follow else None}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        path = f"/jobs/{job_id(job)}/logs" + (f"?{query}" if query else "")
        started = False
        while True:
            try:
                for piece in self._stream(path):
                    started = True
                    yield piece
                return
            except (ConnectionRefusedError, FileNotFoundError):
                self._start()
            except _Dropped as gone:
                # Where the next server would begin is not where this one stopped: hosts take turns
                # in the stream, and an attempt may have ended. So the caller is told.
                if started:
                    raise Refused(f"{gone}; ask for them again") from gone

    def server_status(self) -> Json | None:
        """`{pid, version, home, cloud, jobs, started}`, or None where no server runs."""
        try:
            return self._once("GET", "/status")
        except (ConnectionRefusedError, FileNotFoundError, _Dropped):
            return None

    def stop_server(self) -> bool:
        """Stop the server and wait until it is gone; False where none ran."""
        try:
            self._once("POST", "/stop")
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except _Dropped:
            pass  # it may close the connection before the answer is out
        deadline = time.monotonic() + STOP_SECONDS
        while self._listens():
            if time.monotonic() > deadline:
                raise Refused(
                    f"the server did not stop within {STOP_SECONDS:.0f} s; see {self._log}"
                )
            time.sleep(0.02)
        return True

    def list(self, all: bool = False) -> "list[Json]":  # noqa: A002 - the verb and its option
        # Defined last of the verbs: from here on, `list` in a signature would mean this method.
        """A summary of each job; without `all`, those that ended over a day ago are left out."""
        answer: Any = self._ask("GET", "/jobs?all=1" if all else "/jobs")
        return [*answer]

    # Speaking to the server

    @property
    def _log(self) -> Path:
        return self.home / "server.log"

    def _ask(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        timeout: float | None = ANSWER_SECONDS,
    ) -> Json:
        """Ask, starting a server where none listens. Only what changes nothing is asked twice."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                answer = self._once(method, path, body, timeout)
            except (ConnectionRefusedError, FileNotFoundError):
                self._start()
            except _Dropped as gone:
                if method != "GET":
                    raise Refused(f"{gone}; drumline list shows whether it was done") from gone
            else:
                self._compare_versions()
                return answer
            if time.monotonic() > deadline:
                raise NoServer(f"the server keeps going away; see {self._log}")

    def _once(
        self,
        method: str,
        path: str,
        body: Json | None = None,
        timeout: float | None = ANSWER_SECONDS,
    ) -> Json:
        from http.client import HTTPException

        connection = self._connect(timeout)
        try:
            answer: Json = json.loads(self._send(connection, method, path, body).read())
            return answer
        except TimeoutError as late:
            raise Refused(
                f"the server has not answered in {timeout:.0f} s; see {self._log}"
            ) from late
        except (HTTPException, ConnectionResetError, BrokenPipeError) as gone:
            raise _Dropped("the server went away before it answered") from gone
        except json.JSONDecodeError as odd:
            raise Refused(f"the server's answer to {path} is not JSON; see {self._log}") from odd
        finally:
            connection.close()

    def _send(
        self, connection: "HTTPConnection", method: str, path: str, body: Json | None = None
    ) -> "HTTPResponse":
        """Send the question and return a good answer; any other is raised as its sentence."""
        headers = {"Content-Type": "application/json"} if body is not None else {}
        content = None if body is None else json.dumps(body).encode()
        connection.request(method, path, content, headers)
        answer = connection.getresponse()
        if answer.status < 400:
            return answer
        try:
            sentence = str(json.loads(answer.read())["error"])
        except (ValueError, KeyError, TypeError):
            sentence = f"the server failed with {answer.status} at {path}; see {self._log}"
        raise Refused(sentence)

    def _stream(self, path: str) -> Iterator[bytes]:
        from http.client import HTTPException

        connection = self._connect(None)
        try:
            answer = self._send(connection, "GET", path)
            while piece := answer.read1(1 << 16):
                yield piece
        except (HTTPException, ConnectionResetError, BrokenPipeError) as gone:
            raise _Dropped("the server went away in the middle of the logs") from gone
        finally:
            connection.close()

    def _compare_versions(self) -> None:
        if self._warn is None:
            return
        warn, self._warn = self._warn, None
        running = (self.server_status() or {}).get("version", __version__)
        if running != __version__:
            warn(
                f"the server that runs is version {running}, this command is {__version__}; "
                "after drumline server stop, the next command starts the new one"
            )

    # Having a server

    def _connect(self, timeout: float | None) -> "HTTPConnection":
        """A connection for one question; HTTP over a Unix socket is HTTP with another socket."""
        from http.client import HTTPConnection

        connection = HTTPConnection("drumline", timeout=timeout)
        connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # Without a time-out yet: with one, a queue of callers that is full for a moment is an
            # error, without one it is a short wait.
            connection.sock.connect(str(self.socket))
            connection.sock.settimeout(timeout)
        except PermissionError as closed:
            connection.close()
            raise NoServer(f"{self.socket} belongs to another user") from closed
        except OSError:
            connection.close()
            raise
        return connection

    def _listens(self) -> bool:
        try:
            self._connect(ANSWER_SECONDS).close()
        except (ConnectionRefusedError, FileNotFoundError):
            return False  # never started, stopped, or killed and its socket file left behind
        return True

    def _start(self) -> None:
        """Start a server and wait until one listens: ours, or that of a command beside this one."""
        if not self._autostart:
            raise NoServer(f"no server runs in {self.home}")
        self._make_home()
        deadline = time.monotonic() + START_SECONDS
        child: Popen[bytes] | None = None
        with open(self._log, "ab", opener=_private) as log:
            written = log.seek(0, os.SEEK_END)
            try:
                while not self._listens():
                    code = None if child is None else child.poll()
                    if code:
                        last = _last_line(self._log, written)
                        raise NoServer(f"the server ended as it started ({self._log}): {last}")
                    if time.monotonic() > deadline:
                        raise NoServer(
                            f"no server listens after {START_SECONDS:.0f} s; see {self._log}"
                        )
                    if child is None:
                        child = self._spawn(log)
                    elif code == 0:
                        # Ours found the lock taken and left. If whoever held it was a server on
                        # its way out, nobody will listen: leave time for that, then try again.
                        time.sleep(0.2)
                        child = None
                    time.sleep(0.02)
            finally:
                if child is not None and child.returncode is None:
                    child.returncode = 0  # meant to outlive us, of which Popen would complain
        self._warn = None  # what listens now is of our own version

    def _spawn(self, log: BinaryIO) -> "Popen[bytes]":
        import subprocess

        environ = {
            name: value
            for name, value in os.environ.items()
            if re.fullmatch(_KEPT, name) and name not in self._withheld
        }
        return subprocess.Popen(
            SERVER_COMMAND,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # Not the user's folder: it would come first on the server's import path.
            cwd=self.home,
            env=environ | {"DRUMLINE_HOME": str(self.home)},
            start_new_session=True,
        )

    def _make_home(self) -> None:
        try:
            self.home.mkdir(parents=True, mode=0o700, exist_ok=True)
            owner = self.home.stat().st_uid
            if os.getuid() not in (owner, 0):
                raise NoServer(
                    f"{self.home} belongs to another user; set DRUMLINE_HOME to your own"
                )
            self.home.chmod(0o700)
        except OSError as trouble:
            raise NoServer(f"{self.home} cannot be used: {trouble.strerror}") from trouble


def _ids(jobs: JobId | Iterable[JobId]) -> tuple[str, ...]:
    """All ids are read before the first is acted on: a slip in the last one changes nothing."""
    several = (jobs,) if isinstance(jobs, str | int) else jobs
    return tuple(dict.fromkeys(job_id(one) for one in several))


def _spec(job: "str | Path | Mapping[str, Any] | JobSpec", overrides: Sequence[str]) -> "JobSpec":
    from drumline.jobs.spec import JobSpec, load, validate

    if isinstance(job, JobSpec):
        return job
    if isinstance(job, Mapping):
        return validate(job)
    return load(Path(job), overrides)


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
    except (KeyError, OSError):  # a container may run under a number that has no name
        return str(os.getuid())


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _last_line(path: Path, start: int) -> str:
    with open(path, "rb") as log:
        log.seek(start)
        lines = log.read().decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"
