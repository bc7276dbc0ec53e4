"""A user's command in the working copy of an attempt."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading

from .caller import heard_line
from .environment import find_program, working_copy
from .system.processes import end, session_of
from .wire import Command

# A command whose caller left may put its things away, but nobody waits for what it says.
EXEC_GRACE = 3.0


def execute(folder: str) -> None:
    """Run a command for the user in the job's working copy; ends it when its time is up.

    It also ends when nobody is left to read what it writes: whoever asked for it is gone.
    """
    wanted = heard_line(Command)
    program = find_program(folder)
    cwd = working_copy(program.work) if program else os.path.expanduser("~")
    command = ["bash", "-c", wanted.command]
    stdin = None if wanted.stdin else subprocess.DEVNULL
    child = subprocess.Popen(command, cwd=cwd, stdin=stdin, start_new_session=True)

    def end_all(*_: object) -> None:
        end(lambda: session_of(child.pid), EXEC_GRACE)

    cut_off = threading.Event()

    def end_all_when_cut_off() -> None:
        # Asked for nothing, a poll still tells that the other end of the pipe was closed.
        output = select.poll()
        output.register(sys.stdout.fileno(), 0)
        output.poll()
        cut_off.set()
        end_all()

    signal.signal(signal.SIGHUP, end_all)
    signal.signal(signal.SIGTERM, end_all)
    listening = threading.Thread(target=end_all_when_cut_off, daemon=True)
    listening.start()
    try:
        code = child.wait(wanted.timeout)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        code = 124
    if cut_off.is_set():
        listening.join()  # what does not heed SIGTERM outlives the shell
    sys.exit(128 - code if code < 0 else code)
