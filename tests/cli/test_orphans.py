"""`drumline server strays` lists the slices of a lost database."""

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., int]
Printed = pytest.CaptureFixture[str]

STRAY = {
    "name": "dl-1f0c9a3e-000004-2", "zone": "us-central2-b", "accelerator": "v4-128",
    "state": "READY", "job": "000004", "owner": "1f0c9a3e", "hosts": 16, "adoptable": True,
}  # fmt: skip


@pytest.fixture
def left(server: Any) -> Any:
    server.answers["GET /strays"] = {"strays": [STRAY], "not_seen": {"us-east1-d": "no answer"}}
    server.answers["POST /strays/release"] = {"text": ["it is being released"]}
    server.answers["POST /strays/adopt"] = {"text": ["000007 holds it"]}
    return server


def posted(server: Any) -> list[str]:
    return [path for method, path, _ in server.requests if method == "POST"]


def test_orphans_are_listed_with_the_next_commands(
    left: Any, drumline: Run, capsys: Printed
) -> None:
    assert drumline("server", "strays") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["dl-1f0c9a3e-000004-2", "v4-128", "in", "us-central2-b,"]
    assert "job 000004 of database 1f0c9a3e" in lines[0]
    assert "drumline server strays --release" in lines[1]
    assert lines[2] == "! us-east1-d not polled: no answer"
    assert posted(left) == []


def test_release_needs_a_confirmation(left: Any, drumline: Run, capsys: Printed) -> None:
    assert drumline("server", "strays", "--release") == 2
    assert "add --yes" in capsys.readouterr().err
    assert posted(left) == []
    assert drumline("server", "strays", "--release", "--yes") == 0
    assert capsys.readouterr().out == "it is being released\n"
    assert posted(left) == ["/strays/release"]


def test_orphans_are_adopted_by_name(left: Any, drumline: Run, capsys: Printed) -> None:
    assert drumline("server", "strays", STRAY["name"], "--adopt") == 0
    assert capsys.readouterr().out == "000007 holds it\n"
    (request,) = [body for method, _, body in left.requests if method == "POST"]
    assert request["names"] == [STRAY["name"]]


def test_release_and_adopt_cannot_be_combined(left: Any, drumline: Run, capsys: Printed) -> None:
    assert drumline("server", "strays", "--adopt", "--release") == 2
    assert "cannot be combined" in capsys.readouterr().err
    assert posted(left) == []


def test_no_orphans_are_reported(left: Any, drumline: Run, capsys: Printed) -> None:
    left.answers["GET /strays"] = {"strays": [], "not_seen": {}}
    assert drumline("server", "strays") == 0
    assert capsys.readouterr().out == "there are no slices of a lost database\n"


def test_server_status_reports_orphans_and_unreadable_jobs(
    left: Any, drumline: Run, capsys: Printed
) -> None:
    aside = {"id": "000003", "user": "lab", "name": "x", "reason": "choices: field required"}
    left.answers["GET /status"] |= {"living": 2, "strays": [STRAY], "unreadable": [aside]}
    assert drumline("server", "status") == 0
    out = capsys.readouterr().out
    assert "2 active" in out
    assert "! 1 slice of a lost database; drumline server strays lists them" in out
    assert "! 000003 cannot be read: choices: field required" in out
