"""The SSH server of an emulated host, which runs commands there.

It behaves as OpenSSH, including its surprises: a command outlives a broken connection, and a
channel stays open as long as any process holds its output.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import asyncssh


@dataclass(frozen=True)
class Door:
    """What the server needs to know about its host."""

    home: str
    environment: Callable[[], Mapping[str, str]]
    """The environment of a command that is started now."""
    authorized: Mapping[str, str]
    """The lines of an authorized_keys file, by user."""
    host_key: bytes
    """The private host key, in OpenSSH's format."""


def authorized_keys(metadata: str) -> dict[str, str]:
    """Keys by user, from the metadata `ssh-keys` with lines `user:ssh-ed25519 AAAA comment`."""
    keys: dict[str, str] = {}
    for line in metadata.splitlines():
        user, colon, key = line.strip().partition(":")
        if colon and user and key.strip():
            keys[user] = keys.get(user, "") + key.strip() + "\n"
    return keys


def serve_forever(listening: socket.socket, door: Door, answers: int) -> None:
    """Serve on that socket until killed; writes a byte to the descriptor `answers` once it does."""
    # Relative paths of SFTP and SCP start at the host's home.
    os.chdir(door.home)
    asyncio.run(_serve(listening, door, answers))


CHUNK = 1 << 16


async def _serve(listening: socket.socket, door: Door, answers: int) -> None:
    async def handle(process: asyncssh.SSHServerProcess[bytes]) -> None:
        await _run(process, door)

    await asyncssh.listen(
        sock=listening,
        server_factory=lambda: _Server(door.authorized),
        server_host_keys=[asyncssh.import_private_key(door.host_key)],
        process_factory=handle,
        sftp_factory=_Files,
        allow_scp=True,
        encoding=None,
        line_editor=False,
        password_auth=False,
        kbdint_auth=False,
        gss_host=None,
        # Clients multiplex and stay connected: they set the timeouts.
        login_timeout=120,
    )
    os.write(answers, b"1")
    os.close(answers)
    await asyncio.Event().wait()


class _Files(asyncssh.SFTPServer):
    """Serves files by SFTP, which scp uses."""

    def exit(self) -> None:
        """Report success, or scp reports a good copy as a failure."""
        with contextlib.suppress(OSError):
            self.channel.exit(0)


class _Server(asyncssh.SSHServer):
    """Accepts the keys in the node's metadata."""

    def __init__(self, authorized: Mapping[str, str]) -> None:
        self._authorized = authorized
        self._connection: asyncssh.SSHServerConnection | None = None

    def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
        self._connection = conn

    def begin_auth(self, username: str) -> bool:
        lines = self._authorized.get(username)
        if lines and self._connection is not None:
            with contextlib.suppress(ValueError):
                self._connection.set_authorized_keys(asyncssh.import_authorized_keys(lines))
        return True

    def connection_requested(
        self, dest_host: str, dest_port: int, orig_host: str, orig_port: int
    ) -> bool:
        del dest_host, dest_port, orig_host, orig_port
        return True  # `ssh -L` to a TensorBoard on the host


async def _run(process: asyncssh.SSHServerProcess[bytes], door: Door) -> None:
    """Run a command, or a shell, and pass on its exit status."""
    user = process.channel.get_connection().get_extra_info("username")
    environment = {**door.environment(), "USER": user, "LOGNAME": user, **process.env}
    if process.term_type:
        environment["TERM"] = process.term_type
    # Without a command it is a login shell, as in OpenSSH.
    arguments = ["bash", "-c", process.command] if process.command else ["bash", "-l"]
    start = _start_on_terminal if process.term_type else _start_on_pipes
    try:
        program = await start(process, arguments, {"env": environment, "cwd": door.home})
    except OSError as wrong:
        process.stderr.write(f"cannot start: {wrong}\n".encode())
        process.exit(126)
        return
    process.set_redirect_pid(program.pid)
    code = await program.wait()
    # Output may still be coming, or be held open by what the command left running.
    await process.stdout.drain()
    await process.stderr.drain()
    if code >= 0:
        process.exit(code)
    else:
        name = signal.Signals(-code).name.removeprefix("SIG")
        process.exit_with_signal(name, core_dumped=False)


async def _start_on_pipes(
    process: asyncssh.SSHServerProcess[bytes], arguments: list[str], options: dict[str, Any]
) -> asyncio.subprocess.Process:
    # Pipes of our own instead of asyncio's, which would kill the program when they are closed.
    stdin, to_program = os.pipe()
    from_stdout, stdout = os.pipe()
    from_stderr, stderr = os.pipe()
    try:
        program = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
            **options,
        )
    except OSError:
        for fd in (to_program, from_stdout, from_stderr):
            os.close(fd)
        raise
    finally:
        for fd in (stdin, stdout, stderr):
            os.close(fd)
    # One output may end before the other, so neither ends the channel.
    await process.redirect(stdout=from_stdout, stderr=from_stderr, send_eof=False)
    feeding = asyncio.create_task(_feed(process, to_program, program.pid))
    _feeding.add(feeding)
    feeding.add_done_callback(_feeding.discard)
    return program


_feeding: set[asyncio.Task[None]] = set()
LEFT_SECONDS = 0.5
"""Seconds between checks whether the sender has left, while a program does not read."""


async def _feed(process: asyncssh.SSHServerProcess[bytes], pipe: int, program: int) -> None:
    """Pass a program its input.

    Not by a redirect: asyncio closes a pipe that was filled and closed again during its callback
    for free space, and the contents of the buffer are lost.
    """
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.connect_write_pipe(
        asyncio.streams.FlowControlMixin, os.fdopen(pipe, "wb", 0)
    )
    writer = asyncio.StreamWriter(transport, protocol, None, loop)
    source = process.stdin
    try:
        while True:
            try:
                data = await source.read(CHUNK)
            except asyncssh.BreakReceived:
                os.kill(program, signal.SIGINT)
                continue
            except asyncssh.SignalReceived as sent:
                os.kill(program, signal.Signals[f"SIG{sent.signal}"])
                continue
            if not data:
                return
            writer.write(data)
            if not await _drained(writer, process):
                # The channel closes once all input is read, and then nobody reads the program's
                # output; a program that does not read is not waited for.
                transport.abort()
                while await source.read(CHUNK):
                    pass
                return
    except (OSError, KeyError, asyncssh.Error):
        return  # it has ended or closed its input, or the connection was lost
    finally:
        writer.close()


async def _drained(writer: asyncio.StreamWriter, process: asyncssh.SSHServerProcess[bytes]) -> bool:
    """Wait until a program reads on; False if the sender left before."""
    while True:
        try:
            async with asyncio.timeout(LEFT_SECONDS):
                await writer.drain()
            return True
        except TimeoutError:
            if process.channel.is_closing():
                return False


async def _start_on_terminal(
    process: asyncssh.SSHServerProcess[bytes], arguments: list[str], options: dict[str, Any]
) -> asyncio.subprocess.Process:
    ours, theirs = os.openpty()
    columns, rows, width, height = process.term_size
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, width, height))
    try:
        program = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
            **options,
        )
    except OSError:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    await process.redirect(stdin=os.dup(ours), stdout=ours)
    return program
