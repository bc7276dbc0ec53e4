"""The verbs of the agent. Each call is a new process, so a verb imports only what it needs."""

from __future__ import annotations

import os
from importlib import import_module

from .files import below_root
from .wire import (
    EXEC,
    FREE_PORT,
    LIST_OUTPUTS,
    PREPARE,
    RECEIVE,
    SEND_OUTPUTS,
    START,
    STATUS,
    STEP,
    STOP,
    UNPACK,
    WATCH,
)

ATTEMPT_VERBS = {
    PREPARE: "attempt:prepare",
    START: "attempt:start",
    STATUS: "status:report_status",
    STEP: "steps:run_step",
    WATCH: "status:watch",
    STOP: "attempt:stop",
    EXEC: "execute:execute",
    LIST_OUTPUTS: "outputs:list_outputs",
    SEND_OUTPUTS: "outputs:send_outputs",
}
"""Verbs whose first argument is the folder of an attempt, as `module:function`."""
HOST_VERBS = {
    RECEIVE: "code:receive",
    UNPACK: "code:unpack",
    FREE_PORT: "machine:choose_port",
}


def main(arguments: list[str]) -> None:
    """Run the verb in the first argument."""
    os.umask(0o077)
    verb, rest = arguments[0], arguments[1:]
    module, _, name = (HOST_VERBS.get(verb) or ATTEMPT_VERBS[verb]).partition(":")
    function = getattr(import_module("." + module, __package__), name)
    try:
        if verb in HOST_VERBS:
            function(*rest)
        else:
            function(below_root(rest[0]), *rest[1:])
    except BrokenPipeError:
        # The caller has disconnected. Without _exit, Python would fail again in its last flush.
        os._exit(0)
