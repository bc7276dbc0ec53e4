"""Calls the agent on a host: installs it, sends it verbs, reads its answers."""

import shlex
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from pydantic import ValidationError

from drumline.hosts.agent.wire import EXEC, WATCH, Command, Line, Message, decode, encode
from drumline.hosts.agent_file import AGENT, AGENT_FILE, AGENT_SHA
from drumline.hosts.connection import Connection
from drumline.hosts.health_file import health_file
from drumline.hosts.messages import Answer, checked
from drumline.hosts.values import CompletedCommand, Output

# -I keeps the user's PYTHONPATH and site-packages out of the agent, not out of the program.
AGENT_COMMAND = f'python3 -I "$HOME"/.drumline/{AGENT_FILE}'

# Stores a file. A copy truncated by a lost connection must not be taken for the whole.
INSTALL = """
import hashlib, os, sys
folder, sha = os.path.expanduser("~/.drumline"), sys.argv[2]
data = sys.stdin.buffer.read()
if hashlib.sha256(data).hexdigest() != sha: sys.exit("%s arrived cut short" % sys.argv[1])
os.makedirs(folder, 0o700, True)
draft = os.path.join(folder, "%s.%d" % (sys.argv[1], os.getpid()))
with open(draft, "wb") as file: file.write(data)
os.replace(draft, os.path.join(folder, sys.argv[1]))
"""


class AgentFailed(Exception):
    """The agent failed; the text is its last line of output."""


class RemoteAgent:
    """The agent at the other end of a connection."""

    def __init__(self, connection: Connection, heard: Callable[[], None]) -> None:
        """`heard` is called whenever the agent says something that makes sense.

        Not for a connection alone: a host may let us in and be able to do nothing else.
        """
        self._connection = connection
        self._heard = heard

    async def install(self) -> None:
        """Install the agent unless it is there."""
        await self._store(AGENT_FILE, AGENT_SHA, AGENT)

    async def install_burn_in(self) -> None:
        """Install the burn-in unless it is there."""
        await self._store(*health_file())

    async def _store(self, name: str, sha: str, content: bytes) -> None:
        found = await self._connection.run(f'test -f "$HOME"/.drumline/{name}')
        if found.exit_code != 0:
            words = ["python3", "-I", "-c", INSTALL, name, sha]
            done = await self._connection.run(shlex.join(words), sent=content)
            if done.exit_code != 0:
                raise AgentFailed(_last_line(done) or f"{name} could not be installed")

    async def ask(
        self,
        answer: type[Answer],
        *words: str,
        sent: Message | None = None,
        sent_file: Path | None = None,
    ) -> Answer:
        """Run a verb of the agent and read the last line of its output."""
        done = await self.run(*words, sent=sent, sent_file=sent_file)
        if done.exit_code != 0 or not done.stdout.strip():
            raise AgentFailed(_last_line(done) or f"{words[0]} ended with {done.exit_code}")
        try:
            said = checked(answer, decode(done.stdout.strip().splitlines()[-1]))
        except (ValueError, ValidationError) as trouble:
            raise AgentFailed(f"{words[0]}: an answer that makes no sense") from trouble
        self._heard()
        return said

    async def run(
        self, *words: str, sent: Message | None = None, sent_file: Path | None = None
    ) -> CompletedCommand:
        """Run a verb of the agent; returns its output as it is."""
        command = f"{AGENT_COMMAND} {shlex.join(words)}"
        message = encode(sent).encode() if sent else b""
        return await self._connection.run(command, sent=message, sent_file=sent_file)

    async def run_for_user(
        self, folder: str, wanted: Command, stdin: AsyncIterator[bytes] | None, output: Output
    ) -> int:
        """Run a user's command; `stdin` is the command's own input."""
        command = f"{AGENT_COMMAND} {shlex.join([EXEC, folder])}"
        line = encode(wanted).encode() + b"\n"
        code = await self._connection.run_for_user(command, line, stdin, output)
        self._heard()
        return code

    async def watch(self, folder: str, offset: int) -> AsyncIterator[Line]:
        """The attempt's log from an offset on, and its status at each change, until the end."""
        words = shlex.join([WATCH, folder, str(offset)])
        async for line in self._connection.lines(f"{AGENT_COMMAND} {words}"):
            try:
                said = checked(Line, decode(line))
            except (ValueError, ValidationError) as trouble:
                raise AgentFailed("watch: a line that makes no sense") from trouble
            self._heard()
            yield said


def _last_line(done: CompletedCommand) -> str:
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1][:500] if lines else ""
