"""The entry point of a host's process, so that the emulator need not import the host itself."""

from multiprocessing.connection import Connection

from drumline.cloud.emulator.hosts.terms import HostSpec

PRELOADED = ["drumline.cloud.emulator.hosts.host", __name__]
"""Modules that the fork server of hosts imports."""


def be_host(spec: HostSpec, pipe: Connection) -> None:
    """Run a host until ordered to end."""
    from drumline.cloud.emulator.hosts.host import main

    main(spec, pipe)
