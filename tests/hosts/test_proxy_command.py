"""Connections through a proxy command."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drumline.hosts.connection import Connection, KnownHosts, ProxyFailed
from drumline.hosts.session import Address, HostPhase
from tests.hosts.on_hosts import on_hosts, reach

from .stand_in import FAST, Slice, program

GCLOUD = """Testing if tunnel connection works.
ERROR: (gcloud.compute.start-iap-tunnel) There was a problem refreshing your current auth tokens: \
Reauthentication failed.
Please run:

  $ gcloud auth login

to obtain new credentials.
"""
RELAY = """
import os, selectors, socket, sys
print("a warning that is no part of the connection", file=sys.stderr, flush=True)
host = socket.create_connection((sys.argv[1], int(sys.argv[2])))
waiting = selectors.DefaultSelector()
for end in (0, host):
    waiting.register(end, selectors.EVENT_READ)
while True:
    for key, _ in waiting.select():
        data = os.read(0, 65536) if key.fileobj == 0 else host.recv(65536)
        if not data:
            raise SystemExit
        if key.fileobj == 0:
            host.sendall(data)
        else:
            os.write(1, data)
"""


def through(address: Address, *command: str) -> Address:
    """The same host at an address that is unreachable from this machine."""
    return replace(address, ssh_ip="10.255.255.1", proxy_command=command)


def test_a_program_runs_through_a_proxy_that_writes_warnings(tmp_path: Path) -> None:
    relay = tmp_path / "relay.py"
    relay.write_text(RELAY)

    async def story(slice_: Slice) -> None:
        addresses = [
            through(address, sys.executable, str(relay), address.ssh_ip, str(address.ssh_port))
            for address in (host.address for host in slice_.hosts)
        ]
        session = slice_.session(program(run="echo through the proxy"), addresses=addresses)
        session.start()
        reports = await reach(session, HostPhase.EXITED)
        assert [report.exit_code for report in reports] == [0, 0]
        assert b"through the proxy" in slice_.log(1)

    on_hosts(tmp_path, 2, story)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ("sh", "-c", "echo 4033: not authorized >&2; exit 1"),
            "sh failed with exit status 1: 4033: not authorized$",
        ),
        (("sh", "-c", "exit 3"), "sh failed with exit status 3 and wrote no error$"),
        (("true",), "true ended with exit status 0 before the host answered$"),
        (("sh", "-c", "kill -9 $$"), "sh was killed by signal 9 and wrote no error$"),
        (
            ("sh", "-c", f"printf '%s' {shlex.quote(GCLOUD)} >&2; exit 1"),
            "failed with exit status 1: ERROR: .gcloud.compute.start-iap-tunnel. There was a "
            "problem refreshing your current auth tokens: Reauthentication failed. Please run: "
            "[$] gcloud auth login to obtain new credentials.$",
        ),
        (
            ("sh", "-c", "echo Please enter your password: >&2; exec sleep 60"),
            "sh makes no connection: Please enter your password:$",
        ),
        (("sleep", "60"), "sleep makes no connection$"),
        (("no-such-program",), "no-such-program cannot run: no such file or directory"),
    ],
)
def test_the_error_of_a_proxy_is_reported(
    tmp_path: Path, command: tuple[str, ...], message: str
) -> None:
    async def story(slice_: Slice) -> None:
        address = through(slice_.hosts[0].address, *command)
        with pytest.raises(ProxyFailed, match=message):
            await Connection.open(address, slice_.key, KnownHosts(tmp_path / "known"), FAST)

    on_hosts(tmp_path, 1, story)
