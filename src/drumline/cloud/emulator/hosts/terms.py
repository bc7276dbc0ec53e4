"""What the emulator and a host's process say to each other.

Apart from the host itself, which imports SSH: the emulator starts in half the time without it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

HOWS = ("silent", "reboot", "vfio", "slow", "heal")
ACKNOWLEDGED = "acknowledged"
"""A host's word when it has done what it was told."""


@dataclass(frozen=True)
class HostSpec:
    """What a host is made of."""

    home: Path
    """Its disk; what lies there already was left by the same host before it was stopped."""
    host_key: bytes
    """The private key it proves itself with, in OpenSSH's format."""
    metadata: Mapping[str, str]
    """Of the node: `ssh-keys` opens the login, `startup-script` runs after each boot."""
    chips: int
    emulator: Path
    """The emulator's own folder, where its endpoint is written."""
    buckets: Path
    boot_seconds: float
    mark: str
    """Stands in the environment of all that runs here, as DRUMLINE_HOST_TAG."""


@dataclass(frozen=True)
class Up:
    """The host's word after each boot: its login answers, and where."""

    port: int
    host_key: str


def new_key() -> bytes:
    """A host key for a new host, in OpenSSH's format."""
    key = Ed25519PrivateKey.generate()
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
