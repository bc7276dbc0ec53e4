"""The messages between the emulator and the process of a host, and the entry point of that process.

They are separate from `host`, which imports SSH: without it, the emulator starts in half the time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ACKNOWLEDGED = "acknowledged"
"""The message of a host that has carried out an order."""


@dataclass(frozen=True)
class ChipFault:
    """A chip that computes or receives wrong values. Programs on the host simulate it."""

    how: str
    chip: int
    from_step: int
    seed: int
    """The seed for the time and the value of each error."""


@dataclass(frozen=True)
class MachineFaults:
    """The faults of a physical machine, which do not depend on the node that has it."""

    chip: ChipFault | None = None
    missing: frozenset[int] = frozenset()
    """The indices of missing chips."""
    slow: bool = False
    vfio: bool = False
    """True if the first chip cannot be opened."""

    def listing(self) -> list[dict[str, object]]:
        """Return each fault with the arguments of `break` that cause it."""
        faults: list[dict[str, object]] = []
        if self.chip is not None:
            fault = {"how": self.chip.how, "chip": self.chip.chip}
            faults.append(fault | {"from_step": self.chip.from_step})
        faults += [{"how": "missing-chip", "chip": chip} for chip in sorted(self.missing)]
        faults += [{"how": "slow"}] if self.slow else []
        faults += [{"how": "vfio"}] if self.vfio else []
        return faults


NO_FAULTS = MachineFaults()
Order = str | MachineFaults
"""`silent`, `reboot`, `notice`, `heal` or `end`; or the new faults of the machine."""


@dataclass(frozen=True)
class HostSpec:
    """The parameters of a new host process."""

    home: Path
    """The host's disk. Existing files are from the same host before it was stopped."""
    host_key: bytes
    """The private host key, in OpenSSH's format."""
    metadata: Mapping[str, str]
    """The metadata of the node: `ssh-keys` may log in; `startup-script` runs after each boot."""
    chips: int
    emulator: Path
    """The emulator's home folder, which has its endpoint file."""
    buckets: Path
    boot_seconds: float
    machine: Path
    """The folder of the host's physical machine."""
    faults: MachineFaults
    """The faults of the machine when the host starts."""
    tag: str
    """The value of DRUMLINE_HOST_TAG in the environment of all processes on the host."""


@dataclass(frozen=True)
class Booted:
    """The message of a host after each boot: the port and the key of its SSH server."""

    port: int
    host_key: str


def new_key() -> bytes:
    """Return a new host key in OpenSSH's format."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())


PRELOADED_MODULES = ["drumline.cloud.emulator.host", __name__]
"""The modules that the fork server of hosts imports."""


def run_host(spec: HostSpec, pipe: Connection) -> None:
    """Run a host in this process until it is ordered to end."""
    from drumline.cloud.emulator.host import main

    main(spec, pipe)
