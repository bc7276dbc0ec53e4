"""The runner over SSH, for placements whose hosts are virtual machines.

This module loads without asyncssh, which takes longer to load than the rest of the server.
"""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from drumline.errors import CloudError, UserError
from drumline.hosts.protocol import AddressesUnreadableError, Admit, HostAccess, Program, SshLogin
from drumline.hosts.values import USER, Address, Timing, known_hosts_name, working_copy
from drumline.observed import Fault, FaultType, ListedPlacement, Refusal, Scope

if TYPE_CHECKING:
    from drumline.hosts.session import SliceSession


class MachineCloud(Protocol):
    """The calls of a cloud of virtual machines that SSH needs, beside those of every `Cloud`."""

    async def host_keys(self, placement: ListedPlacement) -> list[str | None]:
        """Return the public SSH key of each host, slice by slice; None if it is not published.

        The list is empty if the number of hosts is unknown.
        """

    async def instance_names(self, placement: ListedPlacement) -> list[str | None]:
        """Return the name of the instance of each host, slice by slice; None if not published."""

    def explain(self, error: CloudError, zone: str) -> Refusal:
        """Classify an error of a call about a zone."""


class SshRunner:
    """Runs programs over SSH; see `protocol.Runner` for each call."""

    def __init__(
        self, cloud: MachineCloud, *, key: Path, public_key: str, known_hosts: Path, timing: Timing
    ) -> None:
        """`key` is the private key of this home, and `known_hosts` the folder of host keys."""
        self._cloud = cloud
        self._key = key
        self.login = SshLogin(USER, public_key)
        self._known_hosts = known_hosts
        self._timing = timing

    async def find_hosts(self, listed: ListedPlacement, access: HostAccess) -> list[Address]:
        """Return the address of each host, with its host key if the cloud publishes it.

        Raises AddressesUnreadableError if the cloud may publish keys that cannot be read now. Then
        no key is trusted at first sight, because secrets would be sent to whoever answers. Keys
        that were pinned before are enough.
        """
        endpoints = listed.endpoints
        proxies = await self._proxy_commands(listed, access)
        try:
            keys = await self._cloud.host_keys(listed)
        except CloudError as error:
            if not all(self._have_keys(listed)):
                refusal = self._cloud.explain(error, listed.zone)
                message = (
                    f"the SSH host keys of {listed.name} cannot be read, so nothing is sent to "
                    f"its hosts: {refusal.message}"
                )
                raise AddressesUnreadableError(replace(refusal, message=message)) from error
            keys = []
        keys = [*keys, *[None] * len(endpoints)][: len(endpoints)]
        return [
            Address(endpoint.ssh_ip, endpoint.ssh_port, endpoint.internal_ip, key, proxy)
            for endpoint, key, proxy in zip(endpoints, keys, proxies, strict=True)
        ]

    async def _proxy_commands(
        self, listed: ListedPlacement, access: HostAccess
    ) -> list[tuple[str, ...]]:
        """Return the proxy command of each host, which is empty for a direct connection.

        Raises AddressesUnreadableError if the command needs the names of the instances and they are
        unknown.
        """
        command, hosts = access.proxy_command, len(listed.endpoints)
        if command is None:
            return [()] * hosts
        names: list[str | None] = [""] * hosts
        if names_instances(command):
            try:
                names = await self._cloud.instance_names(listed)
            except CloudError as error:
                refusal = self._cloud.explain(error, listed.zone)
                message = (
                    f"the instance names for ssh.proxy_command cannot be read: {refusal.message}"
                )
                raise AddressesUnreadableError(replace(refusal, message=message)) from error
        if len(names) != hosts or None in names:
            raise AddressesUnreadableError(
                Refusal(
                    Fault(FaultType.DENIED, Scope.REQUEST),
                    "ssh.proxy_command contains %n, and the cloud publishes no names of the "
                    "instances; allow guest attributes (compute.disableGuestAttributesAccess), "
                    "or use %h",
                )
            )
        return proxy_commands(command, listed, names)

    def _have_keys(self, listed: ListedPlacement) -> list[bool]:
        """Return for each host of a placement True if it has shown its key before."""
        from drumline.hosts.connection import KnownHosts

        known_hosts = KnownHosts(self._known_hosts_file(listed.name))
        return [
            known_hosts.expected_key(Address(e.ssh_ip, e.ssh_port, e.internal_ip)) is not None
            for e in listed.endpoints
        ]

    def session(
        self,
        program: Program,
        placement: str,
        hosts: Sequence[Address],
        *,
        logs: Path,
        log_limit: int,
        clock: Callable[[], float],
        admit: Admit,
    ) -> "SliceSession":
        """Return the session of an attempt on a placement, which `start` begins."""
        from drumline.hosts.environment import shell_program
        from drumline.hosts.session import SliceSession

        return SliceSession(
            shell_program(program),
            hosts,
            key=self._key,
            known_hosts=self._known_hosts,
            node=placement,
            logs=logs,
            clock=clock,
            timing=self._timing,
            log_limit=log_limit,
            admit=admit,
        )

    def was_contacted(self, placement: str) -> bool:
        """Return True if a host of a placement has ever shown its key, before anything was sent."""
        return self._known_hosts_file(placement).exists()

    async def logins(
        self, listed: ListedPlacement, access: HostAccess, job_id: str, archive_sha: str | None
    ) -> list[dict[str, Any]]:
        """Return the addresses of each host, with the files and the user of the login."""
        proxies, have_keys = await self._proxy_commands(listed, access), self._have_keys(listed)
        return [
            {
                "index": index,
                "ip": endpoint.internal_ip,
                "ssh_ip": endpoint.ssh_ip,
                "ssh_port": endpoint.ssh_port,
                "user": USER,
                "key": str(self._key),
                "known_hosts": str(self._known_hosts_file(listed.name)),
                "has_host_key": have_keys[index],
                "folder": f".drumline/{working_copy(job_id, archive_sha)}",
                "proxy_command": [*proxy],
            }
            for index, (endpoint, proxy) in enumerate(zip(listed.endpoints, proxies, strict=True))
        ]

    def forget(self, placement: str) -> None:
        """Delete the host keys of a placement that no longer exists."""
        self._known_hosts_file(placement).unlink(missing_ok=True)

    def _known_hosts_file(self, placement: str) -> Path:
        return self._known_hosts / known_hosts_name(placement)


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


def proxy_commands(
    command: str, listed: ListedPlacement, names: Sequence[str | None]
) -> list[tuple[str, ...]]:
    """Return the program and arguments of a proxy command for each host.

    The command is split like a shell line, and the escapes are replaced afterwards. No shell reads
    it, so `drumline ssh` and the server run the same program. `names` are those of the instances.
    """
    commands = []
    for index, (endpoint, name) in enumerate(zip(listed.endpoints, names, strict=True)):
        values = {
            "h": endpoint.ssh_ip, "p": str(endpoint.ssh_port), "i": str(index), "n": name or "",
            "z": listed.zone, "%": "%",
        }  # fmt: skip
        commands.append(tuple(_replace_escapes(word, values) for word in shlex.split(command)))
    return commands


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
