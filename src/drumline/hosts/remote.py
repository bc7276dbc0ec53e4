"""The server's side of the agent: install it on a host, call its verbs, check its answers.

agent/wire.py defines the messages for both sides. A host runs the user's code, so the server checks
everything that it sends.
"""

import shlex
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
)

from drumline.hosts.agent.wire import (
    EXEC,
    RECEIVE,
    SEND_OUTPUTS,
    WATCH,
    Command,
    Message,
    OutputChunk,
    OutputRequest,
    ReceiveResult,
    WatchLine,
    decode,
    encode,
)
from drumline.hosts.connection import AgentError, Connection
from drumline.hosts.host_files import AGENT, AGENT_FILE, AGENT_SHA, burn_in_file
from drumline.hosts.protocol import OnOutput
from drumline.hosts.values import CompletedCommand

MessageT = TypeVar("MessageT", bound=Message)

# -I and -S hide the user's PYTHONPATH and all site-packages from the agent, whose start they would
# delay. The program still sees them.
AGENT_COMMAND = f'python3 -I -S "$HOME"/.drumline/{AGENT_FILE}'

# Stores a zip file of Python modules, and adds the bytecode for the host's version of Python, which
# every call would compile again. A lost connection must not leave an incomplete file that looks
# complete.
INSTALL = """
import hashlib, importlib.util, marshal, os, sys, zipfile
name, sha = sys.argv[1:]
data = sys.stdin.buffer.read()
if hashlib.sha256(data).hexdigest() != sha: sys.exit("%s arrived incomplete" % name)
folder = os.path.expanduser("~/.drumline")
path = os.path.join(folder, name)
draft = "%s.%d" % (path, os.getpid())
os.makedirs(folder, 0o700, True)
with open(draft, "wb") as file: file.write(data)
header = importlib.util.MAGIC_NUMBER + b"\\1\\0\\0\\0"  # Valid without a look at the source.
with zipfile.ZipFile(draft, "a") as archive:
    for module in archive.namelist():
        source = archive.read(module)
        try: code = compile(source, os.path.join(path, module), "exec")
        except SyntaxError: continue  # It is for the newer Python of a container.
        content = header + importlib.util.source_hash(source) + marshal.dumps(code)
        archive.writestr(module + "c", content)
os.replace(draft, path)
"""


class RemoteAgent:
    """The agent at the other end of a connection."""

    def __init__(self, connection: Connection, on_answer: Callable[[], None]) -> None:
        """`on_answer` is called after each valid answer of the agent.

        A connection is not enough: a host may accept logins and be unable to run anything.
        """
        self._connection = connection
        self._on_answer = on_answer

    async def install(self) -> None:
        """Install the agent if the host does not have it."""
        await self._install_file(AGENT_FILE, AGENT_SHA, AGENT)

    async def install_burn_in(self) -> None:
        """Install the burn-in if the host does not have it."""
        await self._install_file(*burn_in_file())

    async def _install_file(self, name: str, sha: str, content: bytes) -> None:
        test = await self._connection.run(f'test -f "$HOME"/.drumline/{name}')
        if test.exit_code != 0:
            command = shlex.join(["python3", "-I", "-S", "-c", INSTALL, name, sha])
            completed = await self._connection.run(command, input_bytes=content)
            if completed.exit_code != 0:
                raise AgentError(_last_line(completed) or f"{name} could not be installed")

    async def ask(
        self,
        answer_type: type[MessageT],
        *arguments: str,
        message: Message | None = None,
    ) -> MessageT:
        """Call a verb of the agent and return its answer, the last line of its output."""
        data = encode(message).encode() if message else b""
        command = f"{AGENT_COMMAND} {shlex.join(arguments)}"
        completed = await self._connection.run(command, input_bytes=data)
        return self._answer(answer_type, arguments[0], completed)

    async def send_file(self, path: Path, on_sent: Callable[[int], None]) -> None:
        """Send a file of the code. `on_sent` is called with the bytes of each sent piece."""
        arguments = [RECEIVE, path.name, str(path.stat().st_size)]
        command = f"{AGENT_COMMAND} {shlex.join(arguments)}"
        completed = await self._connection.run(command, input_file=path, on_sent=on_sent)
        self._answer(ReceiveResult, RECEIVE, completed)

    def _answer(
        self, answer_type: type[MessageT], verb: str, completed: CompletedCommand
    ) -> MessageT:
        if completed.exit_code != 0 or not completed.stdout.strip():
            error = f"{verb} ended with exit code {completed.exit_code}"
            raise AgentError(_last_line(completed) or error)
        try:
            answer = validate(answer_type, decode(completed.stdout.strip().splitlines()[-1]))
        except (ValueError, ValidationError) as error:
            raise AgentError(f"the agent gave an invalid answer to {verb}") from error
        self._on_answer()
        return answer

    async def run_for_user(
        self, folder: str, message: Command, stdin: AsyncIterator[bytes] | None, output: OnOutput
    ) -> int:
        """Run a command of the user with `stdin` as its input, and return its exit code."""
        command = f"{AGENT_COMMAND} {shlex.join([EXEC, folder])}"
        line = encode(message).encode() + b"\n"
        code = await self._connection.run_for_user(command, line, stdin, output)
        self._on_answer()
        return code

    async def watch(self, folder: str, offset: int) -> AsyncIterator[WatchLine]:
        """Yield the attempt's log from an offset, and its status at each change."""
        arguments = shlex.join([WATCH, folder, str(offset)])
        async for line in self._connection.lines(f"{AGENT_COMMAND} {arguments}"):
            try:
                message = validate(WatchLine, decode(line))
            except (ValueError, ValidationError) as error:
                raise AgentError("the agent sent an invalid line to watch") from error
            self._on_answer()
            yield message

    async def send_outputs(
        self, folder: str, files: Sequence[tuple[str, int]]
    ) -> AsyncGenerator[OutputChunk, None]:
        """Yield the content of outputs in pieces, up to the message that all are sent."""
        command = f"{AGENT_COMMAND} {shlex.join([SEND_OUTPUTS, folder])}"
        request = encode(OutputRequest(files=list(files))).encode()
        async for line in self._connection.lines(command, request):
            try:
                message = validate(OutputChunk, decode(line))
            except (ValueError, ValidationError) as error:
                raise AgentError("the agent sent an invalid line to send-outputs") from error
            self._on_answer()
            yield message
            if message.done:
                return
        raise AgentError("the agent stopped before all outputs were sent")


def _last_line(completed: CompletedCommand) -> str:
    lines = (completed.stderr or completed.stdout).strip().splitlines()
    return lines[-1][:500] if lines else ""


# Validation --------------------------------------------------------------------------------------


def validate(message_type: type[MessageT], value: Mapping[str, object]) -> MessageT:
    """Return a message after checking the type of each field. Ignore unknown fields.

    Raises ValidationError.
    """
    # mypy takes the classes for unhashable, because they define __eq__.
    model = _model(message_type).model_validate(value)  # type: ignore[arg-type]
    return message_type(**{name: getattr(model, name) for name in model.model_fields_set})


@cache
def _model(message_type: type[Message]) -> type[BaseModel]:
    """Return a pydantic model with the fields of a message."""
    # The agent does not import these names, so its annotations are strings.
    hints = get_type_hints(message_type, localns={"ClassVar": ClassVar, "Literal": Literal})
    fields: dict[str, Any] = {}
    for name, hint in hints.items():
        if get_origin(hint) is not ClassVar:
            minimum, maximum = message_type.BOUNDS.get(name, (None, None))
            default = getattr(message_type, name, ...)
            fields[name] = (_validated_type(hint), Field(default, ge=minimum, le=maximum))
    config = ConfigDict(arbitrary_types_allowed=True)
    model: type[BaseModel] = create_model(message_type.__name__, __config__=config, **fields)
    return model


def _validated_type(hint: Any) -> Any:
    """Return the type of a field; a nested message is validated by its own model."""
    for argument in get_args(hint):
        if isinstance(argument, type) and issubclass(argument, Message):
            return Annotated[hint, BeforeValidator(partial(_validate_nested, argument))]
    return hint


def _validate_nested(message_type: type[Message], value: Any) -> Any:
    return validate(message_type, value) if isinstance(value, Mapping) else value
