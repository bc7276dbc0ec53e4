"""Ports for programs that have to be told where to listen."""

import contextlib
import random
import socket


def free_port() -> int:
    """One that nobody uses, below those that the system gives to connections by chance."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
