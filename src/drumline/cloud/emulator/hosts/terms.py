"""The messages between the emulator and a host's process.

Separate from the host itself, which imports SSH: the emulator starts in half the time without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

ACKNOWLEDGED = "acknowledged"
"""The message of a host that has done what it was ordered."""


@dataclass(frozen=True)
class ChipFault:
    """A chip that computes or receives wrong values. Programs on the host play it themselves."""

    how: str
    chip: int
    from_step: int
    seed: int
    """The seed of what goes wrong, and when."""


@dataclass(frozen=True)
class MachineFaults:
    """What is broken in a physical machine, whichever node has it."""

    chip: ChipFault | None = None
    missing: frozenset[int] = frozenset()
    """Chips that are not there any more."""
    slow: bool = False
    vfio: bool = False
    """Whether the first chip cannot be opened."""

    def listing(self) -> list[dict[str, object]]:
        """Each fault as `break` was told it."""
        found: list[dict[str, object]] = []
        if self.chip is not None:
            wrong = {"how": self.chip.how, "chip": self.chip.chip}
            found.append(wrong | {"from_step": self.chip.from_step})
        found += [{"how": "missing-chip", "chip": chip} for chip in sorted(self.missing)]
        found += [{"how": "slow"}] if self.slow else []
        found += [{"how": "vfio"}] if self.vfio else []
        return found


SOUND = MachineFaults()
Order = str | MachineFaults
"""`silent`, `reboot`, `notice`, `heal` or `end`; or the faults that the machine has from now on."""


@dataclass(frozen=True)
class HostSpec:
    """What a host needs to start."""

    home: Path
    """The host's disk; what is there already is of the same host before it was stopped."""
    host_key: bytes
    """The private host key, in OpenSSH's format."""
    metadata: Mapping[str, str]
    """The metadata of the node: `ssh-keys` may log in, `startup-script` runs after each boot."""
    chips: int
    emulator: Path
    """The emulator's home folder, which has its endpoint file."""
    buckets: Path
    boot_seconds: float
    machine: Path
    """The folder of the physical machine that the host is on."""
    faults: MachineFaults
    """The faults of the machine when the host starts."""
    mark: str
    """The value of DRUMLINE_HOST_TAG in the environment of all that runs on the host."""


@dataclass(frozen=True)
class Up:
    """The message of a host after each boot: its SSH server answers, and where."""

    port: int
    host_key: str


def new_key() -> bytes:
    """A host key for a new host, in OpenSSH's format."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
