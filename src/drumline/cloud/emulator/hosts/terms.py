"""The messages between the emulator and a host's process.

Separate from the host itself, which imports SSH: the emulator starts in half the time without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

HOWS = ("silent", "reboot", "vfio", "slow", "heal")
ACKNOWLEDGED = "acknowledged"
"""The message of a host that has done what it was ordered."""


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
