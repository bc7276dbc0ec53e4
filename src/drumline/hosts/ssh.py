"""SSH: the key pair of a home, and the commands that connections go through.

This module loads without asyncssh, which takes longer to load than the rest of the server.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from drumline.errors import UserError

# --- The key pair -----------------------------------------------------------------------------


def ensure_key_pair(key: Path, slices: Sequence[str] | None = None) -> str:
    """Return the public SSH key. Generate the key pair on the first call.

    `slices` are those that know the key. A lost key is not replaced while there are any, because
    a new one would open none of them. If they are unknown, the public key shows that a pair was
    generated. The public key has its own file, so that a start does not import SSH to derive it.
    """
    public = key.with_suffix(".pub")
    try:
        # A public key that is older belongs to a private key that was replaced.
        if public.stat().st_mtime_ns >= key.stat().st_mtime_ns:
            return public.read_text().strip()
    except FileNotFoundError:
        pass
    if not key.exists() and (slices or (slices is None and public.exists())):
        known_by = f", and the hosts of {', '.join(slices)} accept no other key" if slices else ""
        raise UserError(
            f"the SSH key {key} is missing{known_by}; restore it from a backup, or give up "
            f"the programs on these slices with a new key: ssh-keygen -t ed25519 -N '' -f "
            f"{shlex.quote(str(key))}"
        )
    import asyncssh

    if key.exists():
        private_key = asyncssh.read_private_key(key)
    else:
        private_key = asyncssh.generate_private_key("ssh-ed25519", comment="drumline")
        _write_private(key, private_key.export_private_key())
    _write_private(public, private_key.export_public_key())
    return private_key.export_public_key().decode().strip()


def _write_private(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
    temporary.rename(path)


# --- Proxy commands ---------------------------------------------------------------------------

PROXY_ESCAPES = {
    "h": "the address of the host",
    "p": "its SSH port",
    "i": "its index in the slice, from 0",
    "n": "the name of its instance",
    "z": "the zone",
    "%": "a percent sign",
}


def proxy_arguments(
    command: str, *, host: str, port: int, index: int, zone: str, instance: str = ""
) -> tuple[str, ...]:
    """Return the program and arguments of a proxy command for one host.

    The command is split like a shell line, and the escapes are replaced afterwards. No shell reads
    it, so `drumline ssh` and the server run the same program.
    """
    values = {"h": host, "p": str(port), "i": str(index), "n": instance, "z": zone, "%": "%"}
    return tuple(_replace_escapes(word, values) for word in shlex.split(command))


def names_instances(command: str) -> bool:
    """Return True if a proxy command contains `%n`, which needs a call of the cloud."""
    return "n" in proxy_escapes(command)


def proxy_escapes(command: str) -> list[str]:
    """Return the letter of each escape in a proxy command; empty for a `%` at the end."""
    parts = iter(command)
    return [next(parts, "") for letter in parts if letter == "%"]


def _replace_escapes(word: str, values: Mapping[str, str]) -> str:
    letters = iter(word)
    return "".join(
        values.get(next(letters, "%"), "") if letter == "%" else letter for letter in letters
    )
