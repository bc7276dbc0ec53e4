"""The messages between the server and the agent, defined once for both sides.

A call of the agent has a verb and arguments. Further input is one message on standard input. The
agent answers with one message per line on standard output; the last line is the answer, except for
`watch`, which never ends. A message is a JSON object, and its class lists its fields. The agent
trusts what it receives. The server checks every answer against the types (see hosts/remote.py),
because a host runs the user's code.

An agent may have to report on an attempt that an older agent started. So a field never changes its
name or its meaning, and a new field has a default.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False  # avoids the import of typing in every call
if TYPE_CHECKING:
    from typing import Any, ClassVar, Literal, TypeVar, dataclass_transform

    Json = dict[str, Any]
    MessageT = TypeVar("MessageT", bound="Message")
else:

    def dataclass_transform(**_):
        """Return a decorator without effect. Type checkers read annotations as fields."""
        return lambda cls: cls


# The verbs. The first argument of a verb that concerns an attempt is the folder of the attempt.
PREPARE = "prepare"  # seconds to wait for the chips; Prepare → PrepareResult
START = "start"  # Start → AttemptStatus
STATUS = "status"  # → AttemptStatus
STEP = "step"  # SetUpStep → KeepAlive …, StepResult
WATCH = "watch"  # offset in the log → WatchLine …
STOP = "stop"  # grace in seconds → AttemptStatus
EXEC = "exec"  # Command, then the input of the command → its output and exit code
RECEIVE = "receive"  # name, size; the file → ReceiveResult
UNPACK = "unpack"  # Code → CodeResult
FREE_PORT = "free-port"  # → FreePort
LIST_OUTPUTS = "list-outputs"  # OutputPaths → OutputList
SEND_OUTPUTS = "send-outputs"  # OutputRequest → OutputChunk …


@dataclass_transform(kw_only_default=True)
class Message:
    """One JSON object. A field that was not set is not sent and reads as its default."""

    BOUNDS: ClassVar[dict[str, tuple[float, float | None]]] = {}
    """The minimum and maximum of number fields; None means no maximum."""

    def __init__(self, **fields: Any) -> None:
        """Accept unknown fields too: the other side may have a newer version."""
        vars(self).update(fields)

    def __eq__(self, other: object) -> bool:
        """Return True if type and fields are equal."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        """Return the class name and the JSON text."""
        return f"{type(self).__name__} {encode(self)}"


class HostProgram(Message):
    """The program of an attempt on one host."""

    run: str
    environment: dict[str, str]
    variables: dict[str, str]
    """The environment variables that Drumline sets in addition to the user's."""
    checkpoint: str | None = None
    work: str
    """The working copy, relative to ~/.drumline."""
    wrap: list[str]
    """The arguments before `bash`."""
    interpreter: str = ""
    """The Python that `python` and `python3` are; empty for that of the host."""


class Prepare(Message):
    """Everything that an attempt needs on a host."""

    program: Json
    """The fields of a `HostProgram`, stored as they are."""
    secrets: dict[str, str]
    """The secrets, stored in a separate file."""
    archive: str | None
    """The sha of the code; None without code."""
    large_files: list[str] = []  # noqa: RUF012
    """The hashes of the large files of the code."""


class PrepareResult(Message):
    """The state of a host after `prepare`."""

    trouble: str = ""
    """The reason why the chips cannot be used, if any."""
    have_code: bool
    missing: tuple[str, ...] = ()
    """The files of the code that the host does not have."""
    identity: dict[str, str] = {}  # noqa: RUF012
    """The names of this machine, as far as they are known."""


class Start(Message):
    """The parameters of a start."""

    coordinator: str = ""
    """The address where rank 0 listens."""
    before: str = ""
    """Shell commands to run before the program, on the first line of its script."""


class SetUpStep(Message):
    """A set-up step."""

    name: str
    script: str
    retries: int = 0
    """The number of times to repeat the step after an error that passes by itself."""
    pause: float = 15.0
    """Seconds before each repetition."""
    recipe: Json | None = None
    """The fields of a `PythonRecipe`, if the step makes a Python environment."""


class PythonRecipe(Message):
    """A Python environment to create, or to reuse."""

    kind: str
    version: str = ""
    requirements: list[str] = []  # noqa: RUF012
    requirements_file: str = ""
    """A requirements file in the code."""
    job: str
    """The job and its database."""
    own: bool = False
    """True if the job changes the environment, so that it shares it with no other job."""


class StepResult(Message):
    """The result of a set-up step."""

    exit_code: int
    error: str = ""
    tail: tuple[str, ...] = ()
    ran: bool = False
    """True if this call ran the step, False if a previous call did."""


class AttemptStatus(Message):
    """The state of the attempt on this host."""

    state: Literal["none", "running", "exited", "lost"]
    """`lost` means that a restart of the host killed the program."""
    prepared: bool = False
    stopped: bool = False
    repeating: str = ""
    """The reason why a set-up step is repeated, while it is."""
    started_at: float | None = None
    coordinator: str = ""
    exit_code: int | None = None
    ended_at: float | None = None
    error: str = ""
    error_at: float | None = None
    tail: tuple[str, ...] = ()
    going_down: str = ""
    heartbeat: dict[str, object] | None = None
    burnin: dict[str, object] | None = None
    """The report of the burn-in before the program; None without burn-in."""
    log_size: int | None = None
    chip_holder: str = ""
    """The process of the program that held the chip which the program could not open."""
    chip_error: str = ""
    """The error of opening the chips after the failure of the program and the end of its
    processes."""
    location: str = ""
    """The physical location of a chip that libtpu's own log blames."""


class WatchLine(Message):
    """One line of `watch`: a piece of the log, a changed status, or a sign of lifetime."""

    log: str | None = None
    """Bytes of the log, in base64."""
    offset: int = 0
    skipped: int = 0
    """The number of bytes before these that were left out, because the log grows too fast."""
    at: float | None = None
    """The timestamp of the write, by the clock of the host."""
    status: AttemptStatus | None = None
    log_size: int | None = None
    beat: float | None = None

    BOUNDS = {"offset": (0, 1 << 60), "skipped": (0, 1 << 60), "at": (0, 1e11)}  # noqa: RUF012


class KeepAlive(Message):
    """A keep-alive message without a report."""

    beat: float


class Command(Message):
    """A command of the user."""

    command: str
    timeout: float | None = None
    stdin: bool = False
    """True if the input of the command follows this message."""


class FreePort(Message):
    """A free port."""

    port: int

    BOUNDS = {"port": (1, 65535)}  # noqa: RUF012


class Code(Message):
    """The code to unpack."""

    archive: str
    large_files: list[str]
    work: str
    """The working copy, relative to ~/.drumline."""


class CodeResult(Message):
    """The result of `unpack`."""

    have_code: bool
    missing: tuple[str, ...] = ()
    """The files of the code that are missing or damaged."""


class ReceiveResult(Message):
    """The confirmation that a file was stored."""

    received: bool


class OutputPaths(Message):
    """The `outputs` of the job file."""

    paths: list[str]


class OutputList(Message):
    """The outputs of an attempt on one host."""

    files: tuple[tuple[str, int, int], ...]
    """The name in the working copy, the size and the time of change in nanoseconds."""
    problems: tuple[tuple[str, str], ...] = ()
    """The first files that cannot be copied, each with the reason."""
    left_out: int = 0
    """The number of files that cannot be copied."""
    full: bool = False
    """True if there are more files than are listed."""


class OutputRequest(Message):
    """The outputs to send."""

    files: list[tuple[str, int]]
    """The name of each file, and the number of bytes to send."""


class OutputChunk(Message):
    """A piece of a file, in the order of the request. An empty file has one empty piece."""

    index: int = 0
    """The position of the file in the request."""
    data: str = ""
    """Bytes in base64."""
    error: str = ""
    """The reason why this file cannot be sent."""
    done: bool = False
    """True in the last message."""


# The files of the code --------------------------------------------------------------------------

LARGE_FILE_KEY = "DRUMLINE.sha256"
"""The field of an entry in an archive with the hash of a large file, which is sent separately."""


def archive_name(sha: str) -> str:
    """Return the name of the file with an archive."""
    return sha + ".tar.gz"


def large_file_name(sha: str) -> str:
    """Return the name of the compressed file with the content of a large file."""
    return sha + ".gz"


MAX_NESTING = 100
"""The maximum depth of objects and lists. The limit of Python's parser depends on its version."""
_TOO_DEEP = "an object that is nested too deeply"


def encode(message: Message) -> str:
    """Return a message as JSON on one line, without a newline."""
    return json.dumps(vars(message), default=vars)


def decode(line: str | bytes) -> Json:
    """Parse a JSON object. NaN, Infinity and numbers with too many digits become text."""
    value = parse(line)
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    return value


def parse(line: str | bytes) -> Any:
    """Parse any JSON value so that it can be stored and resent. Raise ValueError."""
    text = line if isinstance(line, str) else line.decode("utf-8", "replace")
    try:
        value = json.loads(line, parse_constant=str, parse_int=_parse_int)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if text.count("{") + text.count("[") > MAX_NESTING and _nested_too_deeply(value):
        raise ValueError(_TOO_DEEP)
    return _replace_surrogates(value) if "\\u" in text else value


def _nested_too_deeply(value: Any) -> bool:
    values = [value]
    for _ in range(MAX_NESTING):
        containers = [value for value in values if isinstance(value, (dict, list))]
        values = [
            child
            for container in containers
            for child in (container.values() if isinstance(container, dict) else container)
        ]
    return any(isinstance(value, (dict, list)) for value in values)


def _replace_surrogates(value: Any) -> Any:
    """Replace lone surrogates, which JSON can express and UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_replace_surrogates(item) for item in value]
    if isinstance(value, dict):
        return {_replace_surrogates(key): _replace_surrogates(item) for key, item in value.items()}
    return value


def _parse_int(digits: str) -> int | str:
    return int(digits) if len(digits) <= _MAX_DIGITS else digits[:_MAX_DIGITS] + "…"


_MAX_DIGITS = 40


# Reports of programs -----------------------------------------------------------------------------

RESERVED_METRICS = (
    "step", "time", "total", "resumed", "checkpoint", "loss", "rate", "item", "mfu", "goodput",
    "result",
)  # fmt: skip
"""The names that Drumline uses. They are never dropped from a report with too many names."""
MAX_REPORT_NAMES, MAX_REPORT_NAME, MAX_REPORT_TEXT = 128, 200, 2000
"""The bounds of a report on its way from the host. The server keeps less (see heartbeats.py)."""


def bound_report(report: Json) -> Json:
    """Return a program's report with bounded names and values, and nested values as text."""
    reserved = [name for name in RESERVED_METRICS if name in report]
    others = [name for name in report if name not in RESERVED_METRICS]
    bounded = {}
    for name in (reserved + others)[:MAX_REPORT_NAMES]:
        value = report[name]
        if isinstance(value, (list, dict)):
            try:
                value = json.dumps(value)
            except RecursionError:
                value = "nested too deeply"
        elif isinstance(value, int) and abs(value) >= 1 << 64:
            value = float("inf") if value > 0 else float("-inf")
        bounded[name[:MAX_REPORT_NAME]] = (
            value[:MAX_REPORT_TEXT] if isinstance(value, str) else value
        )
    return bounded


# The agent's side of a connection ---------------------------------------------------------------


def send(message: Message) -> None:
    """Write a message to standard output."""
    sys.stdout.write(encode(message) + "\n")
    sys.stdout.flush()


def receive_message(message_type: type[MessageT]) -> MessageT:
    """Read a message from standard input, up to its end."""
    return message_type(**decode(sys.stdin.read()))


def receive_line(message_type: type[MessageT]) -> MessageT:
    """Read a message from the first line of standard input and leave the rest unread."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return message_type(**decode(line))
