"""Hosts with an SSH server and a home folder each, and a connection that tests can cut."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import asyncssh

from drumline.cloud.emulator.processes import command_line
from drumline.hosts.agent.processes import all_pids, is_alive, process_environment
from drumline.hosts.host_files import AGENT_FILE
from drumline.hosts.protocol import PythonEnvironment
from drumline.hosts.session import Address, ShellProgram, SliceSession, Timing
from tests.hosts.installed_agent import installed_agent

Link = tuple[asyncio.StreamWriter, asyncio.StreamWriter]

FAST = Timing(
    connect_timeout=3,
    keepalive_interval=0.3,
    keepalive_count=2,
    reconnect_first=0.05,
    reconnect_most=0.2,
    device_wait=0.3,
    stop_margin=3,
)


def program(**parts: Any) -> ShellProgram:
    defaults: dict[str, Any] = {
        "job_id": "000012",
        "name": "digits",
        "attempt": 1,
        "accelerator": "v4-16",
        "archive": None,
        "archive_sha": None,
        "mounts": {},
        "python": PythonEnvironment("system"),
        "setup": None,
        "run": "true",
        "environment": {},
        "secrets": {},
        "hosts": None,
        "checkpoint": None,
    }
    return ShellProgram(**{**defaults, **parts})


async def until(condition: Callable[[], object], what: str, seconds: float = 60) -> None:
    """Wait for a condition. Fail with its description at the timeout."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        await asyncio.sleep(0.02)


class _Login(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        del username
        return True


async def _copy_input(source: Any, sink: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, asyncssh.Error):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    sink.close()


async def _copy_output(source: asyncio.StreamReader, sink: Any) -> None:
    while data := await source.read(1 << 16):
        sink.write(data)
        await sink.drain()


class Host:
    """One host. It has the agent until it is rebooted."""

    def __init__(self, home: Path, authorized: Path) -> None:
        self.home = home
        self.environment: dict[str, str] = {}
        self.commands: list[str] = []
        self.children: list[asyncio.subprocess.Process] = []
        self.host_key = asyncssh.generate_private_key("ssh-ed25519")
        self._authorized = authorized
        self._links: set[Link] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.ssh_port = self.port = 0

    async def start(self) -> None:
        agent = self.home / ".drumline" / AGENT_FILE
        agent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        agent.write_bytes(installed_agent())
        self._server = await asyncssh.create_server(
            _Login,
            "127.0.0.1",
            self.ssh_port,
            server_host_keys=[self.host_key],
            authorized_client_keys=str(self._authorized),
            process_factory=self._serve,
            encoding=None,
            config=None,
        )
        self.ssh_port = self._server.get_port()
        self._front = await asyncio.start_server(self._link, "127.0.0.1", self.port)
        self.port = self._front.sockets[0].getsockname()[1]

    @property
    def address(self) -> Address:
        return Address("127.0.0.1", self.port, "127.0.0.1", None)

    async def _serve(self, process: "asyncssh.SSHServerProcess[bytes]") -> None:
        command = process.command or ""
        self.commands.append(command)
        child = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self.home,
            env={
                "HOME": str(self.home),
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                **self.environment,
            },
        )
        self.children.append(child)
        assert child.stdin is not None
        assert child.stdout is not None
        assert child.stderr is not None
        feeding = asyncio.create_task(_copy_input(process.stdin, child.stdin))
        closing = asyncio.create_task(self._close_with(process, child))
        try:
            await asyncio.gather(
                _copy_output(child.stdout, process.stdout),
                _copy_output(child.stderr, process.stderr),
            )
            code = await child.wait()
            if code < 0:
                process.exit_with_signal(signal.Signals(-code).name[3:])
            else:
                process.exit(code)
        except (OSError, asyncssh.Error):
            process.close()
        finally:
            feeding.cancel()
            closing.cancel()

    async def _close_with(
        self, process: "asyncssh.SSHServerProcess[bytes]", child: asyncio.subprocess.Process
    ) -> None:
        """Close the pipes with the channel, as sshd does. The command continues."""
        await process.wait_closed()
        for fd in (1, 2):
            # The close of the process would kill it.
            child._transport.get_pipe_transport(fd).close()  # type: ignore[attr-defined]

    # The link -----------------------------------------------------------------------------------

    async def _link(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            far, forth = await asyncio.open_connection("127.0.0.1", self.ssh_port)
        except OSError:
            back.transport.abort()
            return
        pair = (forth, back)
        self._links.add(pair)
        try:
            await asyncio.gather(self._carry(near, pair, 0), self._carry(far, pair, 1))
        finally:
            self._links.discard(pair)

    async def _carry(self, source: asyncio.StreamReader, pair: Link, side: int) -> None:
        """Forward data until one side closes, then close both."""
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                pair[side].write(data)
                await pair[side].drain()
        for end in pair:
            end.transport.abort()

    def cut(self) -> None:
        """Cut every connection. New ones work."""
        for pair in list(self._links):
            for end in pair:
                end.transport.abort()

    def drop_data(self) -> None:
        """Drop all data without closing the connections."""
        self._open.clear()

    def pass_data(self) -> None:
        self._open.set()

    # The machine --------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """All processes of this host."""
        variable = b"\0HOME=" + str(self.home).encode() + b"\0"
        return [pid for pid in all_pids() if variable in b"\0" + process_environment(pid)]

    def runs(self, words: str) -> bool:
        """Return True if the command line of a process of this host contains these arguments."""
        return any(words in command_line(pid) and is_alive(pid) for pid in self.pids())

    def reboot(self) -> None:
        """Kill all processes at once and empty the disk."""
        self.kill()
        shutil.rmtree(self.home)
        self.home.mkdir()
        self.cut()

    def kill(self) -> None:
        # Stopped first, so that no process can record the death of another. Repeated, because a
        # process may fork after it was listed.
        while pids := [pid for pid in self.pids() if is_alive(pid)]:
            for how in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with contextlib.suppress(OSError):
                        os.kill(pid, how)

    async def stop(self) -> None:
        self._front.close()
        self.pass_data()
        self.cut()
        self._server.close()
        self.kill()
        await self._server.wait_closed()


async def run_command(
    session: SliceSession, host: int, command: str, **more: Any
) -> tuple[int, bytes, bytes]:
    """Run a command and return its exit code, stdout and stderr."""
    written = {"stdout": bytearray(), "stderr": bytearray()}

    async def output(stream: str, data: bytes) -> None:
        written[stream] += data

    code = await session.run(host, command, output, **more)
    return code, bytes(written["stdout"]), bytes(written["stderr"])


class Slice:
    """Some hosts and the sessions on them."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder = folder
        self.key = folder / "id_ed25519"
        self.key.parent.mkdir(parents=True, exist_ok=True)
        key = asyncssh.generate_private_key("ssh-ed25519")
        key.write_private_key(str(self.key))
        authorized = folder / "authorized"
        authorized.write_bytes(key.export_public_key())
        self.hosts = [Host(folder / f"home-{n}", authorized) for n in range(hosts)]
        self.sessions: list[SliceSession] = []

    async def __aenter__(self) -> "Slice":
        for host in self.hosts:
            await host.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self.sessions:
            await session.close()
        for host in self.hosts:
            await host.stop()
        # The tasks of cut connections and killed processes end before the loop closes.
        for host in self.hosts:
            for child in host.children:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        await until(lambda: len(asyncio.all_tasks()) <= 1, f"quiet: {asyncio.all_tasks()}")

    def session(self, attempt_program: ShellProgram, **parts: Any) -> SliceSession:
        defaults: Mapping[str, Any] = {
            "key": self.key,
            "known_hosts": self.folder / "known",
            "logs": self.folder / "logs",
            "timing": FAST,
        }
        addresses = parts.pop("addresses", [host.address for host in self.hosts])
        session = SliceSession(attempt_program, addresses, **{**defaults, **parts})
        self.sessions.append(session)
        return session

    def log(self, host: int) -> bytes:
        path = self.folder / "logs" / f"host-{host}.log"
        return path.read_bytes() if path.exists() else b""
