"""What server and agent say to each other, written down once for both sides.

A call of the agent is one verb with its words. What it takes beside them is one message on standard
input; what it answers is one message a line on standard output, of which the last line counts and
`watch` has no last. A message is a JSON object, and a class here names its fields: the agent makes
it and takes it as it is; the server checks every answer against the types (hosts/messages.py),
because a host runs the user's code.

An attempt may have been begun by the agent of an earlier version, whose files later agents read.
So a field never changes its name or its meaning; a new one has a default.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False  # spares each call the import of typing
if TYPE_CHECKING:
    from typing import Any, ClassVar, Literal, dataclass_transform

    Json = dict[str, Any]
else:

    def dataclass_transform(**_):
        """What tells a type checker that the annotations of a class are its fields."""
        return lambda kind: kind


# The verbs. Those of an attempt have its folder as their first word.
PREPARE = "prepare"  # seconds to wait for the chips; Prepare → Prepared
START = "start"  # Start → AttemptStatus
STATUS = "status"  # → AttemptStatus
STEP = "step"  # SetUpStep → Beat …, StepEnded
WATCH = "watch"  # offset in the log → Line …
STOP = "stop"  # grace in seconds → AttemptStatus
EXEC = "exec"  # Command, then its own input → its output and its exit code
RECEIVE = "receive"  # sha; the archive → Received
UNPACK = "unpack"  # sha, working copy → Prepared
FREE_PORT = "free-port"  # → Port


@dataclass_transform(kw_only_default=True)
class Message:
    """One JSON object. What is not given is not sent, and reads as its default."""

    BOUNDS: ClassVar[dict[str, tuple[float, float | None]]] = {}
    """The least and the greatest that a number may be, None where any is good."""

    def __init__(self, **fields: Any) -> None:
        """Also of fields that this version does not know: another one may have sent them."""
        vars(self).update(fields)

    def __eq__(self, other: object) -> bool:
        """Whether the same is said."""
        return type(self) is type(other) and vars(self) == vars(other)

    def __repr__(self) -> str:
        """As it is sent."""
        return f"{type(self).__name__} {encode(self)}"


class HostProgram(Message):
    """What an attempt runs on one host."""

    run: str
    environment: dict[str, str]
    variables: dict[str, str]
    """What Drumline sets beside the user's own."""
    checkpoint: str | None = None
    work: str
    """The working copy, below ~/.drumline."""
    wrap: list[str]
    """Words put before `bash`."""


class Prepare(Message):
    """All that an attempt needs."""

    program: Json
    """A `HostProgram`, as it is kept in a file."""
    secrets: dict[str, str]
    """Apart, for a file of their own."""
    archive: str | None
    """The sha of the code; None where there is none."""


class Prepared(Message):
    """What a host still lacks."""

    trouble: str = ""
    """Why its chips cannot be used."""
    have_code: bool
    identity: dict[str, str] = {}  # noqa: RUF012
    """Which machine it is, as far as it knows."""


class Start(Message):
    """Where the first host listens."""

    coordinator: str = ""
    before: str = ""
    """What the shell does first, on the first line of the run."""


class SetUpStep(Message):
    """A set-up step."""

    name: str
    script: str


class StepEnded(Message):
    """How a set-up step ended."""

    exit_code: int
    error: str = ""
    tail: tuple[str, ...] = ()
    ran: bool = False
    """Whether this call ran it, or an earlier one."""


class AttemptStatus(Message):
    """What the agent knows of the attempt."""

    state: Literal["none", "running", "exited", "lost"]
    """Lost is what a restart of the host has ended."""
    prepared: bool = False
    stopped: bool = False
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
    """How the burn-in before the program went; None where there was none."""
    log_size: int | None = None


class Line(Message):
    """One line of `watch`: a piece of the log, the status after a change, or just a beat."""

    log: str | None = None
    """In base64."""
    offset: int = 0
    at: float | None = None
    """When the log was written, by the host's clock."""
    status: AttemptStatus | None = None
    log_size: int | None = None
    beat: float | None = None

    BOUNDS = {"offset": (0, None), "at": (0, 1e11)}  # noqa: RUF012


class Beat(Message):
    """A sign of life while there is nothing else to say."""

    beat: float


class Command(Message):
    """A user's command."""

    command: str
    timeout: float | None = None
    stdin: bool = False
    """Whether its own input follows this line."""


class Port(Message):
    """A free port."""

    port: int

    BOUNDS = {"port": (1, 65535)}  # noqa: RUF012


class Received(Message):
    """The archive is here."""

    received: bool


def encode(message: Message) -> str:
    """A message on its line, without the end of the line."""
    return json.dumps(vars(message), default=vars)


def decode(line: str | bytes) -> Json:
    """One JSON object; NaN, Infinity and endless digits, as in a heartbeat, become text."""
    text = line if isinstance(line, str) else line.decode("utf-8", "replace")
    try:
        value = json.loads(line, parse_constant=str, parse_int=_whole)
        if "\\u" in text:
            value = _clean(value)
    except RecursionError:
        raise ValueError("an object that is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("expected an object")
    return value


def _clean(value: Any) -> Any:
    """Without halves of characters, which JSON can write and UTF-8 cannot."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_clean(item) for item in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(item) for key, item in value.items()}
    return value


def _whole(digits: str) -> int | str:
    return int(digits) if len(digits) <= _MOST_DIGITS else digits[:_MOST_DIGITS] + "…"


_MOST_DIGITS = 40
