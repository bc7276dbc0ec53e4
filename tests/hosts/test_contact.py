"""Structured reasons for unreachable hosts."""

import errno
import os
import socket
from dataclasses import replace
from pathlib import Path

import asyncssh
import pytest

from drumline.hosts.agent.wire import archive_name
from drumline.hosts.connection import (
    Connection,
    HostKeyChanged,
    ProxyFailed,
    UnusableFileError,
)
from drumline.hosts.contact import (
    CLOSED,
    HOST_KEY,
    KEY_REFUSED,
    LOCAL,
    MISSING_FILE,
    NO_ADDRESS,
    PROXY,
    REFUSED,
    TIMEOUT,
    UNREACHABLE,
    contact_failure,
    describe_connection_error,
)
from drumline.hosts.session import HostPhase
from drumline.hosts.values import Address
from drumline.observed import ContactFailure

from .on_hosts import on_hosts
from .stand_in import Slice, program, until

EXTERNAL = Address("34.1.2.3", 22, "10.0.0.2")
INTERNAL = Address("10.0.0.2", 22, "10.0.0.2")


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (asyncssh.PermissionDenied("Permission denied"), KEY_REFUSED),
        (TimeoutError(), TIMEOUT),
        (failed(errno.ETIMEDOUT), TIMEOUT),
        (failed(errno.ECONNREFUSED), REFUSED),
        (failed(errno.EHOSTUNREACH), UNREACHABLE),
        (failed(errno.ENETUNREACH), UNREACHABLE),
        (failed(errno.ECONNRESET), CLOSED),
        (asyncssh.ConnectionLost("Connection lost"), CLOSED),
        (asyncssh.ProtocolError("not SSH"), CLOSED),
        (HostKeyChanged("another key"), HOST_KEY),
        (UnusableFileError("no key"), MISSING_FILE),
        (failed(errno.EMFILE), LOCAL),
        (failed(errno.ENFILE), LOCAL),
        (failed(errno.ENOMEM), LOCAL),
        (failed(errno.ENOSPC), LOCAL),
        (failed(errno.EACCES), LOCAL),
        (failed(errno.ENOENT), LOCAL),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_the_kind_of_a_failure(error: Exception, failure: ContactFailure) -> None:
    assert contact_failure(error, EXTERNAL) is failure
    assert describe_connection_error(error)


@pytest.mark.parametrize("number", [errno.ETIMEDOUT, errno.EHOSTUNREACH])
def test_a_host_without_external_address_is_distinguished_from_a_firewall(number: int) -> None:
    assert contact_failure(failed(number), INTERNAL) is NO_ADDRESS
    loopback = Address("127.0.0.1", 22, "127.0.0.1")
    assert contact_failure(failed(number), loopback) is not NO_ADDRESS


@pytest.mark.parametrize(
    "error", [TimeoutError(), asyncssh.ConnectionLost(""), ProxyFailed("iap failed: 4033")]
)
def test_a_host_that_does_not_answer_through_a_proxy_is_a_failure_of_the_proxy(
    error: Exception,
) -> None:
    address = replace(INTERNAL, proxy_command=("iap",))
    assert contact_failure(error, address) is PROXY


def test_the_report_of_a_host_has_a_rejected_key(tmp_path: Path) -> None:
    async def story(stand_ins: Slice) -> None:
        other = asyncssh.generate_private_key("ssh-ed25519").export_public_key()
        (stand_ins.folder / "authorized").write_bytes(other)
        session = stand_ins.session(program())
        session.start()
        await until(lambda: session.reports()[0].contact is not None, "a failure")
        (report,) = session.reports()
        assert report.contact is KEY_REFUSED
        assert report.heard_at is None
        assert report.detail == "the host rejects Drumline's SSH key"

    on_hosts(tmp_path, 1, story)


def test_a_lost_key_is_named_and_the_contact_recovers_with_it(tmp_path: Path) -> None:
    async def story(stand_ins: Slice) -> None:
        content = stand_ins.key.read_bytes()
        stand_ins.key.unlink()
        session = stand_ins.session(program(run="sleep 60"))
        session.start()
        await until(lambda: session.reports()[0].contact is not None, "a failure")
        (report,) = session.reports()
        assert report.contact is MISSING_FILE
        assert f"the SSH key {stand_ins.key} is missing" in report.detail
        stand_ins.key.write_bytes(content)
        stand_ins.key.chmod(0o600)
        await until(lambda: session.reports()[0].phase is HostPhase.RUNNING, "it runs")
        assert session.reports()[0].contact is None

    on_hosts(tmp_path, 1, story)


def test_a_lost_archive_is_no_fault_of_the_host(tmp_path: Path) -> None:
    async def story(stand_ins: Slice) -> None:
        archive = tmp_path / archive_name("a" * 64)
        session = stand_ins.session(program(archive=archive, archive_sha="a" * 64))
        session.start()
        await until(lambda: session.reports()[0].contact is not None, "a failure")
        (report,) = session.reports()
        assert report.contact is MISSING_FILE
        assert str(archive) in report.detail
        assert report.heard_at is not None

    on_hosts(tmp_path, 1, story)


def test_no_more_files_here_are_no_silence_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(stand_ins: Slice) -> None:
        async def full(*_: object) -> Connection:
            raise failed(errno.EMFILE)

        monkeypatch.setattr(Connection, "open", full)
        session = stand_ins.session(program())
        session.start()
        await until(lambda: session.reports()[0].contact is not None, "a failure")
        assert session.reports()[0].contact is LOCAL
        assert session.reports()[0].detail == "too many open files"

    on_hosts(tmp_path, 1, story)


def test_a_closed_port_is_refused(tmp_path: Path) -> None:
    async def story(stand_ins: Slice) -> None:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            stand_ins.hosts[0].port = unused.getsockname()[1]
        session = stand_ins.session(program())
        session.start()
        await until(lambda: session.reports()[0].contact is not None, "a failure")
        assert session.reports()[0].contact is REFUSED

    on_hosts(tmp_path, 1, story)
