"""Where a host's process begins. The emulator names it, and so need not import the host itself."""

from multiprocessing.connection import Connection

from drumline.cloud.emulator.hosts.terms import HostSpec

PRELOADED = ["drumline.cloud.emulator.hosts.host", __name__]
"""What the process that hosts are forked from has imported."""


def be_host(spec: HostSpec, pipe: Connection) -> None:
    """Be a host until told to end."""
    from drumline.cloud.emulator.hosts.host import main

    main(spec, pipe)
