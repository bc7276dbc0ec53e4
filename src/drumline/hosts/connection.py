"""One SSH connection to one host.

Only Drumline's own key is used: no SSH agent, no password, no SSH configuration of the user. The
host must show the key that the cloud published or, if none is published, the first key it showed.
"""

import asyncio
import contextlib
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from signal import SIGKILL, Signals
from typing import IO, Self

import asyncssh

from drumline.errors import HostError
from drumline.files import write_atomically
from drumline.hosts.protocol import OnOutput, Stream
from drumline.hosts.values import USER, Address, CompletedCommand, Timing

MAX_ANSWER_BYTES = 8 << 20
"""The size of one answer, or of one line of a watch. The largest is a status of about 3 MB: a
report of 1 MB whose characters are escaped. A set-up step would have to run for weeks."""
MAX_WATCH_RATE = 20_000_000
"""Bytes per second that are read of a watch. The agent sends 10 MB of log per second at most, and
base64 adds a third."""
SEND_BYTES = 1 << 18
"""The bytes of a file that are read and sent at once."""
CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""The ciphers to prefer: most processors compute them several times faster than other ciphers."""


class AgentError(HostError):
    """The agent failed. The text is the last line of its output, or the rule that it broke."""


class ConnectionLost(HostError):
    """The connection closed before the end of the command, whose exit code is unknown."""


class ProxyFailed(HostError):
    """The proxy command exited without a connection. The text has the last line of its errors."""


class HostKeyChanged(HostError):
    """The host shows another key than before, or than the cloud published."""


class UnusableFileError(HostError):
    """A file on this machine that a connection needs is missing or cannot be read."""


class KnownHosts:
    """The keys of the hosts of one slice, in a file for `ssh -o UserKnownHostsFile=…`."""

    def __init__(self, file: Path) -> None:
        """`file` need not exist."""
        self.file = file

    def expected_key(self, address: Address) -> str | None:
        """Return the key that a host must show, or None if any key is accepted."""
        if address.host_key is not None:
            return _without_comment(address.host_key)
        name = _host_name(address)
        for line in self._lines():
            fields = line.split()
            if len(fields) >= 3 and fields[0] == name:
                return _without_comment(" ".join(fields[1:]))
        return None

    def pin(self, address: Address, key: str) -> None:
        """Require this key of a host from now on."""
        name = _host_name(address)
        entry = f"{name} {_without_comment(key)}"
        lines = self._lines()
        if entry in lines:
            return
        lines = [line for line in lines if line.split()[:1] != [name]] + [entry]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, "".join(line + "\n" for line in lines))

    def _lines(self) -> list[str]:
        try:
            return self.file.read_text().splitlines()
        except FileNotFoundError:
            return []


def _host_name(address: Address) -> str:
    return address.ssh_ip if address.ssh_port == 22 else f"[{address.ssh_ip}]:{address.ssh_port}"


def _without_comment(key: str) -> str:
    """Return only the type and the data of a public key."""
    return " ".join(key.split()[:2])


def _key_algorithms(key: str | None) -> list[str]:
    """Return the algorithms to offer, so that the host shows a key of the expected type."""
    key_type = key.split()[0] if key else ""
    if key_type == "ssh-rsa":
        return ["rsa-sha2-512", "rsa-sha2-256"]
    return [key_type] if key_type else ["ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512"]


class _HostKeyCheck(asyncssh.SSHClient):
    """Compares the host's key before any data is sent."""

    def __init__(self, address: Address, known_hosts: KnownHosts) -> None:
        self.address = address
        self.known_hosts = known_hosts
        self.rejected = False
        self.key = ""
        """The key that the host showed."""

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        del host, addr, port
        self.key = _without_comment(key.export_public_key("openssh").decode())
        expected = self.known_hosts.expected_key(self.address)
        self.rejected = expected is not None and expected != self.key
        return not self.rejected


PROXY_EXIT_SECONDS = 0.5
"""Seconds to wait for the exit status of a proxy command after its connection has closed."""
MAX_PROXY_ERROR = 300
_ERROR_LINE = re.compile(r"(?:error|fatal)\b", re.IGNORECASE)


class _Proxy:
    """A running proxy command, with a socket as its input and output.

    asyncssh can run one too, but takes its errors for data of the host.
    """

    def __init__(self, program: str, process: asyncio.subprocess.Process, errors: IO[bytes]):
        self._program = program
        self._process = process
        self._errors = errors

    @classmethod
    async def start(cls, command: Sequence[str]) -> tuple[Self, socket.socket]:
        """Start the command. Return it with the socket to speak SSH over. Raises ProxyFailed."""
        local, remote = socket.socketpair()
        errors = tempfile.TemporaryFile()  # noqa: SIM115  closed by `stop`
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=remote.fileno(),
                stdout=remote.fileno(),
                stderr=errors,
                start_new_session=True,
            )
        except OSError as error:
            local.close()
            errors.close()
            reason = (error.strerror or str(error)).lower()
            raise ProxyFailed(f"the proxy command {command[0]} cannot run: {reason}") from error
        finally:
            remote.close()
        return cls(command[0], process, errors), local

    async def error(self) -> ProxyFailed:
        """End the command. Return why there is no connection, with the command's own error."""
        with contextlib.suppress(TimeoutError):
            # It closes the socket shortly before it exits.
            await asyncio.wait_for(self._process.wait(), PROXY_EXIT_SECONDS)
        status, error = self._process.returncode, self._last_error()
        if status is None:
            ending = "makes no connection"
            self.stop()
            await self._process.wait()
        elif status == 0:
            ending = "ended with exit status 0 before the host answered"
        else:
            signal, code = f"was killed by signal {-status}", f"failed with exit status {status}"
            ending = (signal if status < 0 else code) + ("" if error else " and wrote no error")
        return ProxyFailed(f"the proxy command {self._program} {ending}{error and f': {error}'}")

    def _last_error(self) -> str:
        """Return the last error that the command wrote to stderr, on one line, or its last line."""
        self._errors.seek(0)
        text = self._errors.read(1 << 16).decode("utf-8", "replace")
        lines = [line for line in (" ".join(line.split()) for line in text.splitlines()) if line]
        # gcloud continues an error on the lines below it.
        first = max((n for n, line in enumerate(lines) if _ERROR_LINE.match(line)), default=-1)
        error = " ".join(lines[first:])
        return error if len(error) <= MAX_PROXY_ERROR else f"{error[: MAX_PROXY_ERROR - 1]}…"

    def stop(self) -> None:
        """Kill the command and the processes that it started."""
        self._errors.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, SIGKILL)


def _ignore_bytes(count: int) -> None:
    del count


class Connection:
    """An open connection, which may run any number of commands at the same time."""

    def __init__(self, ssh: asyncssh.SSHClientConnection, proxy: _Proxy | None = None) -> None:
        """`ssh` is an established connection, over a proxy if there is one."""
        self._ssh = ssh
        self._proxy = proxy

    @classmethod
    async def open(
        cls, address: Address, key: Path, known_hosts: KnownHosts, timing: Timing
    ) -> Self:
        """Connect to a host.

        Raises HostKeyChanged, ProxyFailed, UnusableFileError, OSError or asyncssh.Error.
        """
        check = _HostKeyCheck(address, known_hosts)
        private_key = _read_key(key)
        ssh, proxy, sock = None, None, None
        if address.proxy_command:
            proxy, sock = await _Proxy.start(address.proxy_command)
        try:
            ssh, _ = await asyncssh.create_connection(
                lambda: check,
                address.ssh_ip,
                address.ssh_port,
                sock=sock,
                username=USER,
                client_keys=[private_key],
                known_hosts=([], [], []),
                server_host_key_algs=_key_algorithms(known_hosts.expected_key(address)),
                x509_trusted_certs=None,
                config=None,
                agent_path=None,
                preferred_auth="publickey",
                gss_host=None,
                compression_algs=None,
                encryption_algs=CIPHERS,
                connect_timeout=timing.connect_timeout,
                login_timeout=timing.connect_timeout,
                keepalive_interval=timing.keepalive_interval,
                keepalive_count_max=timing.keepalive_count,
            )
        except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed) as error:
            if check.rejected or known_hosts.expected_key(address) is not None:
                raise HostKeyChanged(
                    f"{_host_name(address)} does not show the host key that it had before: either "
                    f"the host was replaced, or the connection is intercepted; if the host was "
                    f"replaced, remove its line from {known_hosts.file}"
                ) from error
            raise
        except (OSError, asyncssh.ConnectionLost, asyncssh.ProtocolError) as error:
            if proxy is not None:
                raise await proxy.error() from error
            raise
        finally:
            if proxy is not None and ssh is None:
                proxy.stop()
        known_hosts.pin(address, check.key)
        return cls(ssh, proxy)

    async def run(
        self,
        command: str,
        input_bytes: bytes = b"",
        input_file: Path | None = None,
        on_sent: Callable[[int], None] = _ignore_bytes,
    ) -> CompletedCommand:
        """Run a shell command, whose arguments must be quoted, with an input.

        `on_sent` is called with the number of bytes of each sent piece of `input_file`. Raises
        AgentError if the output is too long.
        """
        if input_file is None:
            process = await self._ssh.create_process(command, input=input_bytes, encoding=None)
        else:
            process = await self._ssh.create_process(command, encoding=None)
        writer = asyncio.create_task(_write_file(process.stdin, input_file, on_sent))
        try:
            stdout, stderr = await asyncio.gather(
                _read_answer(process.stdout), _read_answer(process.stderr)
            )
        except AgentError:
            process.channel.abort()
            raise
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        await process.wait_closed()
        code = _exit_code(process.exit_status, process.exit_signal)
        return CompletedCommand(code, stdout, stderr)

    async def run_for_user(
        self, command: str, first_input: bytes, stdin: AsyncIterator[bytes] | None, output: OnOutput
    ) -> int:
        """Run a command of the user and return its exit code; a negative code is a signal.

        Its input is `first_input` and then `stdin`. Its output goes to `output` at once; while
        `output` runs, the command waits. Cancellation closes the channel, and then the agent ends
        the command.
        """
        process = await self._ssh.create_process(command, encoding=None)

        async def write_input() -> None:
            # The command may end before it has read its whole input.
            with contextlib.suppress(OSError, asyncssh.Error):
                process.stdin.write(first_input)
                if stdin is not None:
                    async for data in stdin:
                        process.stdin.write(data)
                        await process.stdin.drain()
                process.stdin.write_eof()

        async def read_output(stream: Stream, reader: asyncssh.SSHReader[bytes]) -> None:
            while data := await reader.read(1 << 16):
                await output(stream, data)

        writer = asyncio.create_task(write_input())
        readers = asyncio.gather(
            read_output("stdout", process.stdout), read_output("stderr", process.stderr)
        )
        try:
            await readers
            await process.wait_closed()
        finally:
            readers.cancel()
            writer.cancel()
            await asyncio.gather(readers, writer, return_exceptions=True)
            # `close` would wait until the command has read its whole input.
            process.channel.abort()
        return _exit_code(process.exit_status, process.exit_signal)

    async def lines(self, command: str, input_bytes: bytes = b"") -> AsyncIterator[bytes]:
        """Yield the output of a long-running command line by line.

        Raises ConnectionLost, or AgentError if a line is too long.
        """
        # Nobody reads stderr, and the connection would wait for a reader.
        process = await self._ssh.create_process(
            command,
            input=input_bytes,
            stdin=asyncssh.DEVNULL,
            stderr=asyncssh.DEVNULL,
            encoding=None,
        )
        try:
            rest = b""
            while data := await process.stdout.read(1 << 16):
                *complete, rest = (rest + data).split(b"\n")
                for line in complete:
                    yield line
                if len(rest) > MAX_ANSWER_BYTES:
                    raise _too_long()
                # The host waits meanwhile, because its window is full.
                await asyncio.sleep(len(data) / MAX_WATCH_RATE)
            await process.wait_closed()
            if process.exit_status is None and process.exit_signal is None:
                raise ConnectionLost("connection lost")
        finally:
            process.close()

    async def close(self) -> None:
        """Close the connection. Programs on the host continue."""
        self._ssh.close()
        with contextlib.suppress(asyncssh.Error, OSError):
            await self._ssh.wait_closed()
        if self._proxy is not None:
            self._proxy.stop()

    def abort(self) -> None:
        """Close the connection at once, without a disconnect message."""
        self._ssh.abort()
        if self._proxy is not None:
            self._proxy.stop()


def _exit_code(status: int | None, signal: tuple[str, bool, str, str] | None) -> int:
    """Return the exit code of a command; a negative code is a signal."""
    if signal is not None:
        name = f"SIG{signal[0]}"
        return -Signals[name] if name in Signals.__members__ else -1
    if status is None:
        raise ConnectionLost("connection lost")
    return status


async def _write_file(
    writer: asyncssh.SSHWriter[bytes], file: Path | None, on_sent: Callable[[int], None]
) -> None:
    """Send a file as the input of a command, which may end before it has read all of it."""
    if file is None:
        return
    with contextlib.suppress(OSError, asyncssh.Error), file.open("rb") as source:
        while data := source.read(SEND_BYTES):
            writer.write(data)
            await writer.drain()
            on_sent(len(data))
        writer.write_eof()


async def _read_answer(reader: asyncssh.SSHReader[bytes]) -> str:
    answer = bytearray()
    while data := await reader.read(1 << 16):
        answer += data
        if len(answer) > MAX_ANSWER_BYTES:
            raise _too_long()
    return answer.decode("utf-8", "replace")


def _too_long() -> AgentError:
    return AgentError(f"the host sent more than {MAX_ANSWER_BYTES >> 20} MB in one answer")


def _read_key(path: Path) -> asyncssh.SSHKey:
    try:
        return asyncssh.read_private_key(path)
    except FileNotFoundError as error:
        raise UnusableFileError(
            f"the SSH key {path} is missing on this machine; hosts of existing slices accept no "
            "other key, so restore it from a backup, or delete the jobs on these slices"
        ) from error
    except (PermissionError, asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        raise UnusableFileError(f"the SSH key {path} cannot be read: {error}") from error


def check_archive(path: Path) -> None:
    """Raise UnusableFileError if the archive of the code cannot be read."""
    try:
        path.open("rb").close()
    except (FileNotFoundError, PermissionError) as error:
        raise UnusableFileError(
            f"the archive of the code {path} cannot be read on this machine "
            f"({(error.strerror or '').lower()}); drumline resume packs it again"
        ) from error


def check_interpreter(path: Path) -> None:
    """Raise UnusableFileError if the Python of a job on the emulator no longer exists."""
    if not os.access(path, os.X_OK):
        raise UnusableFileError(
            f"the Python that created this job, {path}, is no longer on this machine; "
            "drumline resume continues the job with the Python of that command"
        )
