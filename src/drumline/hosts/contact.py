"""The failures of connections to hosts over SSH: their kinds, and the advice for each."""

import errno
import ipaddress

import asyncssh

from drumline.hosts.connection import HostKeyChanged, ProxyFailed, UnusableFileError
from drumline.hosts.values import Address
from drumline.observed import ContactFailure, ContactFault

KEY_REFUSED = ContactFailure(
    ContactFault.UNKNOWN,
    "the hosts reject Drumline's SSH key",
    "with OS Login, a host ignores the keys in its metadata: turn it off for these VMs "
    "(enable-oslogin=FALSE), or ask who enforces it by a policy of the organization",
    slices=1,
    answered=True,
)
NO_ADDRESS = ContactFailure(
    ContactFault.HOST,
    "the hosts have no external address, and their internal ones do not answer",
    "give them external addresses, run Drumline inside their network, or connect through IAP "
    "with ssh.proxy_command",
    slices=1,
)
PROXY = ContactFailure(
    ContactFault.UNKNOWN,
    "the proxy command makes no connection",
    "correct ssh.proxy_command",
    slices=1,
    from_command=True,
)
TIMEOUT = ContactFailure(
    ContactFault.HOST,
    "connections to port 22 time out",
    "allow TCP port 22 from this machine in the firewall of the hosts' network, or connect "
    "through IAP with ssh.proxy_command",
    slices=2,
)
UNREACHABLE = ContactFailure(
    ContactFault.HOST,
    "there is no route to the hosts",
    "check the network of this machine and the addresses of the hosts, or connect through IAP "
    "with ssh.proxy_command",
    slices=2,
)
REFUSED = ContactFailure(
    ContactFault.HOST,
    "the hosts refuse connections to port 22",
    "check that the image and the startup script leave sshd running on port 22",
    slices=2,
)
CLOSED = ContactFailure(
    ContactFault.HOST,
    "connections to port 22 are closed before the login",
    "check for a firewall or proxy between this machine and the hosts, and that sshd of the "
    "image accepts connections",
    slices=2,
)
HOST_KEY = ContactFailure(ContactFault.HOST, "the hosts show other keys than before")
LOCAL = ContactFailure(
    ContactFault.LOCAL, "this machine cannot connect: it has too many open files, for example"
)
MISSING_FILE = ContactFailure(
    ContactFault.LOCAL, "the SSH key or the archive of the code is missing here", passes=False
)

_NO_ROUTE = frozenset(
    {errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN, errno.EADDRNOTAVAIL}
)
_CLOSED = frozenset({errno.ECONNRESET, errno.ECONNABORTED, errno.EPIPE})


def contact_failure(error: BaseException, address: Address) -> ContactFailure:
    """Return the kind of an error of a connection, or of the attempt to open one."""
    match error:
        case UnusableFileError():
            return MISSING_FILE
        case HostKeyChanged():
            return HOST_KEY
        case ProxyFailed():
            return PROXY
        case asyncssh.PermissionDenied():
            return KEY_REFUSED
        case ConnectionRefusedError():
            return REFUSED
        case TimeoutError() | asyncssh.ConnectionLost() if address.proxy_command:
            return PROXY
        case TimeoutError():
            return _without_answer(address, TIMEOUT)
        case OSError(errno=code) if code in _NO_ROUTE:
            return _without_answer(address, UNREACHABLE)
        case OSError(errno=code) if code is not None and code not in _CLOSED:
            # Too many open files, or a full disk.
            return LOCAL
    return CLOSED


def _without_answer(address: Address, failure: ContactFailure) -> ContactFailure:
    """Return NO_ADDRESS for a host that has only an internal address, else the failure."""
    try:
        ip = ipaddress.ip_address(address.ssh_ip)
    except ValueError:
        return failure
    internal = address.ssh_ip == address.internal_ip and ip.is_private and not ip.is_loopback
    return NO_ADDRESS if internal else failure


def describe_connection_error(error: BaseException) -> str:
    """Return the reason why a host could not be reached, for the user."""
    if isinstance(error, TimeoutError):
        return "no answer"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, asyncssh.PermissionDenied):
        return "the host rejects Drumline's SSH key"
    if isinstance(error, asyncssh.ConnectionLost | ConnectionResetError):
        return "connection lost"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
