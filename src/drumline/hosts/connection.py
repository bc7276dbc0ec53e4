"""One SSH connection to one host, kept open.

Only our own key is used: no SSH agent, no password, no SSH configuration of the user. The host must
show the key that the cloud published for it or, where none is published, the key it showed first.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from signal import Signals
from typing import Self

import asyncssh

from drumline.hosts.values import Address, CompletedCommand, Output, Stream, Timing

USER = "drumline"


class ConnectionCut(Exception):
    """The connection ended before the command did, whose outcome is not known."""


class HostKeyChanged(Exception):
    """The host shows a different key than before, or than the cloud published."""


class KnownHosts:
    """The keys of one slice's hosts, in a file that `ssh -o UserKnownHostsFile=…` reads too."""

    def __init__(self, file: Path) -> None:
        """Keep keys in this file; it need not exist."""
        self.file = file

    def key_of(self, address: Address) -> str | None:
        """The key that this host must show; None if any key is accepted."""
        if address.host_key is not None:
            return _plain(address.host_key)
        name = _name(address)
        for line in self._lines():
            fields = line.split()
            if len(fields) >= 3 and fields[0] == name:
                return _plain(" ".join(fields[1:]))
        return None

    def keep(self, address: Address, key: str) -> None:
        """Pin a key."""
        name = _name(address)
        entry = f"{name} {_plain(key)}"
        lines = self._lines()
        if entry in lines:
            return
        lines = [line for line in lines if line.split()[:1] != [name]] + [entry]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        draft = self.file.with_name(f".{self.file.name}.{os.getpid()}")
        draft.write_text("".join(line + "\n" for line in lines))
        draft.replace(self.file)

    def _lines(self) -> list[str]:
        try:
            return self.file.read_text().splitlines()
        except FileNotFoundError:
            return []


def _name(address: Address) -> str:
    return address.ssh_ip if address.ssh_port == 22 else f"[{address.ssh_ip}]:{address.ssh_port}"


def _plain(key: str) -> str:
    """Type and key, without the comment."""
    return " ".join(key.split()[:2])


def _algorithms(key: str | None) -> list[str]:
    """The key algorithms to accept, so that the host shows the key we can compare."""
    kind = key.split()[0] if key else ""
    if kind == "ssh-rsa":
        return ["rsa-sha2-512", "rsa-sha2-256"]
    return [kind] if kind else ["ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512"]


class _HostCheck(asyncssh.SSHClient):
    """Compares the host's key before anything is sent."""

    def __init__(self, address: Address, known: KnownHosts) -> None:
        self.address = address
        self.known = known
        self.refused = False
        self.shown = ""

    def validate_host_public_key(
        self, host: str, addr: str, port: int, key: asyncssh.SSHKey
    ) -> bool:
        del host, addr, port
        self.shown = _plain(key.export_public_key("openssh").decode())
        expected = self.known.key_of(self.address)
        self.refused = expected is not None and expected != self.shown
        return not self.refused


class Connection:
    """An open connection; any number of commands may run on it at once."""

    def __init__(self, ssh: asyncssh.SSHClientConnection) -> None:
        """Take over an established connection."""
        self._ssh = ssh

    @classmethod
    async def open(cls, address: Address, key: Path, known: KnownHosts, timing: Timing) -> Self:
        """Connect; raises HostKeyChanged, OSError or asyncssh.Error."""
        check = _HostCheck(address, known)
        try:
            ssh, _ = await asyncssh.create_connection(
                lambda: check,
                address.ssh_ip,
                address.ssh_port,
                username=USER,
                client_keys=[str(key)],
                known_hosts=([], [], []),
                server_host_key_algs=_algorithms(known.key_of(address)),
                x509_trusted_certs=None,
                config=None,
                agent_path=None,
                preferred_auth="publickey",
                gss_host=None,
                compression_algs=None,
                connect_timeout=timing.connect_timeout,
                login_timeout=timing.connect_timeout,
                keepalive_interval=timing.keepalive_interval,
                keepalive_count_max=timing.keepalive_count,
            )
        except (asyncssh.HostKeyNotVerifiable, asyncssh.KeyExchangeFailed) as trouble:
            if check.refused or known.key_of(address) is not None:
                raise HostKeyChanged(
                    f"{_name(address)} does not show the host key it had before: it was replaced "
                    f"or somebody is in between; if it was replaced, remove its line in "
                    f"{known.file}"
                ) from trouble
            raise
        known.keep(address, check.shown)
        return cls(ssh)

    async def run(
        self, command: str, sent: bytes = b"", sent_file: Path | None = None
    ) -> CompletedCommand:
        """Run a shell command to its end. Its arguments must be quoted; data belongs in `sent`."""
        done = (
            await self._ssh.run(command, stdin=str(sent_file), encoding=None)
            if sent_file
            else await self._ssh.run(command, input=sent, encoding=None)
        )
        code = _code(done.exit_status, done.exit_signal)
        return CompletedCommand(code, _text(done.stdout), _text(done.stderr))

    async def run_for_user(
        self, command: str, sent: bytes, stdin: AsyncIterator[bytes] | None, output: Output
    ) -> int:
        """Run a user's command and return its exit code; negative is a signal.

        Its input is `sent` and then all of `stdin`. Its output goes to `output` as it comes, and
        the command is held up until `output` returns. Cancelling this closes the channel, by which
        the agent knows that the command is to end.
        """
        process = await self._ssh.create_process(command, encoding=None)

        async def feed() -> None:
            # A command may end before it has read all its input.
            with contextlib.suppress(OSError, asyncssh.Error):
                process.stdin.write(sent)
                if stdin is not None:
                    async for piece in stdin:
                        process.stdin.write(piece)
                        await process.stdin.drain()
                process.stdin.write_eof()

        async def pass_on(stream: Stream, source: asyncssh.SSHReader[bytes]) -> None:
            while data := await source.read(1 << 16):
                await output(stream, data)

        feeding = asyncio.create_task(feed())
        passing = asyncio.gather(
            pass_on("stdout", process.stdout), pass_on("stderr", process.stderr)
        )
        try:
            await passing
            await process.wait_closed()
        finally:
            passing.cancel()
            feeding.cancel()
            await asyncio.gather(passing, feeding, return_exceptions=True)
            # A plain close would wait until the command has read all that was sent to it.
            process.channel.abort()
        return _code(process.exit_status, process.exit_signal)

    async def lines(self, command: str) -> AsyncIterator[bytes]:
        """The output of a long-lived command, line by line; raises ConnectionCut if it is cut."""
        process = await self._ssh.create_process(command, stdin=asyncssh.DEVNULL, encoding=None)
        try:
            rest = b""
            while data := await process.stdout.read(1 << 16):
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    yield line
            await process.wait_closed()
            if process.exit_status is None and process.exit_signal is None:
                raise ConnectionCut("connection lost")
        finally:
            process.close()

    async def close(self) -> None:
        """Close the connection; what runs on the host goes on."""
        self._ssh.close()
        with contextlib.suppress(asyncssh.Error, OSError):
            await self._ssh.wait_closed()

    def abort(self) -> None:
        """Close the connection at once, without a disconnect message."""
        self._ssh.abort()


def _code(status: int | None, signal: tuple[str, bool, str, str] | None) -> int:
    """The exit code of a command; negative is a signal."""
    if signal is not None:
        name = f"SIG{signal[0]}"
        return -Signals[name] if name in Signals.__members__ else -1
    if status is None:
        raise ConnectionCut("connection lost")
    return status


def _text(data: object) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else str(data or "")


def in_words(trouble: BaseException) -> str:
    """Why a host could not be reached, as a text for the user."""
    if isinstance(trouble, TimeoutError):
        return "no answer"
    if isinstance(trouble, ConnectionRefusedError):
        return "connection refused"
    if isinstance(trouble, asyncssh.PermissionDenied):
        return "the host does not take our key"
    if isinstance(trouble, asyncssh.ConnectionLost | ConnectionResetError):
        return "connection lost"
    if isinstance(trouble, OSError) and trouble.strerror:
        return trouble.strerror.lower()
    return str(trouble) or type(trouble).__name__
