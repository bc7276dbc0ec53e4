"""A command of the user in the working copy of an attempt."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

from .environment import find_program, host_environment, working_copy
from .processes import session_processes, terminate
from .wire import Command, receive_line

# Seconds that a command has to clean up after its caller has disconnected.
GRACE_SECONDS = 3.0


def execute(folder: str) -> None:
    """Run a command in the job's working copy. End it at its timeout or with its caller."""
    message = receive_line(Command)
    program = find_program(folder)
    cwd = working_copy(program.work) if program else os.path.expanduser("~")
    command = ["bash", "-c", message.command]
    stdin = None if message.stdin else subprocess.DEVNULL
    environment = host_environment(folder, program)
    child = subprocess.Popen(command, cwd=cwd, env=environment, stdin=stdin, start_new_session=True)

    def end_command(*_: object) -> None:
        terminate(lambda: session_processes(child.pid), GRACE_SECONDS)

    disconnected = threading.Event()

    def end_command_on_disconnect() -> None:
        # A poll without events still reports that the other end of the pipe was closed.
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        output.poll()
        disconnected.set()
        end_command()

    signal.signal(signal.SIGHUP, end_command)
    signal.signal(signal.SIGTERM, end_command)
    monitor = threading.Thread(target=end_command_on_disconnect, daemon=True)
    monitor.start()
    try:
        code = child.wait(message.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        code = 124
    if disconnected.is_set():
        monitor.join()  # a process that ignores SIGTERM outlives the shell
    sys.exit(128 - code if code < 0 else code)
