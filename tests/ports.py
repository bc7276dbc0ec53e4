"""Free ports for programs that take a port as an argument."""

import contextlib
import random
import socket


def free_port() -> int:
    """Return an unused port below the range that the system assigns to connections."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
