"""The agent's verbs. Each imports what it needs: on a host, every call is a process of its own."""

from __future__ import annotations

import os
from importlib import import_module

from .system.files import below_root
from .wire import (
    EXEC,
    FREE_PORT,
    PREPARE,
    RECEIVE,
    START,
    STATUS,
    STEP,
    STOP,
    UNPACK,
    WATCH,
)

OF_ATTEMPT = {
    PREPARE: "attempt:prepare",
    START: "attempt:start",
    STATUS: "status:tell",
    STEP: "steps:step",
    WATCH: "watch:watch",
    STOP: "stopping:stop",
    EXEC: "execute:execute",
}
OTHERS = {
    RECEIVE: "code:receive",
    UNPACK: "code:unpack",
    FREE_PORT: "attempt:choose_port",
}


def main(words: list[str]) -> None:
    """Do what the first word says."""
    os.umask(0o077)
    verb, rest = words[0], words[1:]
    module, _, name = (OTHERS.get(verb) or OF_ATTEMPT[verb]).partition(":")
    do = getattr(import_module("." + module, __package__), name)
    try:
        if verb in OTHERS:
            do(*rest)
        else:
            do(below_root(rest[0]), *rest[1:])
    except BrokenPipeError:
        # Whoever listened is gone. Python would complain once more when it flushes at exit.
        os._exit(0)
