"""The SSH server of an emulated host, which runs commands there.

It behaves like OpenSSH: a command survives a lost connection, and a channel stays open as long as a
process holds its output.
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
class SshSettings:
    """The host's settings for its SSH server."""

    home: str
    environment: Callable[[], Mapping[str, str]]
    """A function that returns the environment of a new command."""
    authorized: Mapping[str, str]
    """The lines of an authorized_keys file, by user."""
    host_key: bytes
    """The private host key, in OpenSSH's format."""


def authorized_keys(metadata: str) -> dict[str, str]:
    """Return keys by user from the metadata `ssh-keys`: lines `user:ssh-ed25519 AAAA comment`."""
    keys: dict[str, str] = {}
    for line in metadata.splitlines():
        user, colon, key = line.strip().partition(":")
        if colon and user and key.strip():
            keys[user] = keys.get(user, "") + key.strip() + "\n"
    return keys


def serve_forever(listening: socket.socket, settings: SshSettings, ready: int) -> None:
    """Serve on a socket until killed. Write a byte to the descriptor `ready` once it serves."""
    # SFTP and SCP resolve relative paths from the current folder.
    os.chdir(settings.home)
    asyncio.run(_serve(listening, settings, ready))


CHUNK = 1 << 16


async def _serve(listening: socket.socket, settings: SshSettings, ready: int) -> None:
    async def handle(process: asyncssh.SSHServerProcess[bytes]) -> None:
        await _run(process, settings)

    await asyncssh.listen(
        sock=listening,
        server_factory=lambda: _Server(settings.authorized),
        server_host_keys=[asyncssh.import_private_key(settings.host_key)],
        process_factory=handle,
        sftp_factory=_Files,
        allow_scp=True,
        encoding=None,
        line_editor=False,
        password_auth=False,
        kbdint_auth=False,
        gss_host=None,
        # Long, because the clients set their own timeouts.
        login_timeout=120,
    )
    os.write(ready, b"1")
    os.close(ready)
    await asyncio.Event().wait()


class _Files(asyncssh.SFTPServer):
    """Serves files by SFTP, which scp uses."""

    def exit(self) -> None:
        """Report success. Without it, scp reports a failure after a complete copy."""
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


async def _run(process: asyncssh.SSHServerProcess[bytes], settings: SshSettings) -> None:
    """Run a command or a shell, and report its exit status."""
    user = process.channel.get_connection().get_extra_info("username")
    environment = {**settings.environment(), "USER": user, "LOGNAME": user, **process.env}
    if process.term_type:
        environment["TERM"] = process.term_type
    # Without a command it is a login shell, as in OpenSSH.
    arguments = ["bash", "-c", process.command] if process.command else ["bash", "-l"]
    start = _start_on_terminal if process.term_type else _start_on_pipes
    try:
        program = await start(process, arguments, {"env": environment, "cwd": settings.home})
    except OSError as error:
        process.stderr.write(f"cannot start: {error}\n".encode())
        process.exit(126)
        return
    process.set_redirect_pid(program.pid)
    code = await program.wait()
    # A process that the command left running may still write or hold the output.
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
    # asyncio kills the program when its own pipes are closed, so use other pipes.
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
    # send_eof=False, because one output may end before the other.
    await process.redirect(stdout=from_stdout, stderr=from_stderr, send_eof=False)
    task = asyncio.create_task(_write_input(process, to_program, program.pid))
    _input_tasks.add(task)
    task.add_done_callback(_input_tasks.discard)
    return program


_input_tasks: set[asyncio.Task[None]] = set()
DISCONNECT_CHECK_SECONDS = 0.5
"""The interval of checks for a disconnected client while a program does not read its input."""


async def _write_input(process: asyncssh.SSHServerProcess[bytes], pipe: int, program: int) -> None:
    """Pass the client's input to a program.

    A redirect would lose data: asyncio drops the buffer of a pipe that is filled and closed during
    the callback for free space.
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
            except asyncssh.SignalReceived as error:
                os.kill(program, signal.Signals[f"SIG{error.signal}"])
                continue
            if not data:
                return
            writer.write(data)
            if not await _drain(writer, process):
                # The client has disconnected. Read the rest of its input, because the channel only
                # closes after that, and do not wait for a program that does not read.
                transport.abort()
                while await source.read(CHUNK):
                    pass
                return
    except (OSError, KeyError, asyncssh.Error):
        return  # the program has ended or closed its input, or the connection was lost
    finally:
        writer.close()


async def _drain(writer: asyncio.StreamWriter, process: asyncssh.SSHServerProcess[bytes]) -> bool:
    """Wait until the program reads. Return False if the client disconnects before."""
    while True:
        try:
            async with asyncio.timeout(DISCONNECT_CHECK_SECONDS):
                await writer.drain()
            return True
        except TimeoutError:
            if process.channel.is_closing():
                return False


async def _start_on_terminal(
    process: asyncssh.SSHServerProcess[bytes], arguments: list[str], options: dict[str, Any]
) -> asyncio.subprocess.Process:
    server_end, program_end = os.openpty()
    columns, rows, width, height = process.term_size
    fcntl.ioctl(program_end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, width, height))
    try:
        program = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=program_end,
            stdout=program_end,
            stderr=program_end,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0) and None,
            **options,
        )
    except OSError:
        os.close(server_end)
        raise
    finally:
        os.close(program_end)
    await process.redirect(stdin=os.dup(server_end), stdout=server_end)
    return program
