"""Burn-ins before the program that pass, fail, are missing, or print nonsense."""

import json
from typing import Any

import pytest

from drumline.hosts.driver import _burn_in_fields
from drumline.hosts.host_files import burn_in_command, burn_in_file
from tests.hosts.agent.machine import Machine, wait_for

PASSES = """
import os
file = os.path.join(os.path.dirname(os.environ["DRUMLINE_HEARTBEAT"]), "burnin.json")
open(file, "w").write('{"verdict": "pass", "seconds": 1, "said": "ok"}')
"""


def begin(machine: Machine, run: str, burn_in: str | None, **parts: Any) -> None:
    """Start a program on a host with this script as its burn-in, or with none."""
    machine.put(run, **parts)
    if burn_in is not None:
        (machine.home / ".drumline" / burn_in_file()[0]).write_text(burn_in)
    machine.attempt("start", sent={"coordinator": "10.0.0.1:1", "before": burn_in_command(3)})


def test_a_failed_burn_in_ends_the_run_in_a_container_too(machine: Machine) -> None:
    begin(machine, "echo ran", "raise SystemExit(86)", wrap=("env", "HOME=/nowhere"))
    assert machine.ended()["exit_code"] == 86
    assert "ran" not in machine.log()


@pytest.mark.parametrize(
    "burn_in", [None, "raise SystemExit(1)", "import os; os.kill(os.getpid(), 9)"]
)
def test_a_burn_in_that_cannot_run_is_reported_and_the_program_runs(
    machine: Machine, burn_in: str | None
) -> None:
    begin(machine, "echo ran; exit 3", burn_in)
    ended = machine.ended()
    assert ended["exit_code"] == 3
    assert ended["burnin"]["verdict"] == "warn"
    assert "could not run" in ended["burnin"]["said"]


@pytest.mark.parametrize(
    ("run", "log"),
    [
        ("#!/bin/bash\necho one", "one\n"),
        ("# what this does\necho one", "one\n"),
        ("cat <<END\none\nEND", "one\n"),
        ("\n\necho one", "one\n"),
        ("set -u; echo $LINENO\necho $LINENO", "1\n2\n"),
    ],
)
def test_the_burn_in_does_not_change_the_program(machine: Machine, run: str, log: str) -> None:
    begin(machine, run, PASSES)
    ended = machine.ended()
    assert (ended["exit_code"], ended["burnin"]["verdict"]) == (0, "pass")
    assert machine.log() == log


@pytest.mark.parametrize("left", ["", "[1]", '"verdict"', "{", '{"said": "' + "x" * 2_000_000])
def test_an_unreadable_burn_in_report_is_a_warning(machine: Machine, left: str) -> None:
    begin(machine, "sleep 60", f"{PASSES}\nopen(file, 'w').write({left!r})")
    burn_in = wait_for(
        lambda: (report := machine.attempt("status")["burnin"])["verdict"] != "running" and report,
        "the burn-in is over",
    )
    assert burn_in["verdict"] == "warn"


@pytest.mark.parametrize(
    "report",
    [
        {},
        {"verdict": None},
        {"verdict": ["pass"]},
        {"verdict": {"pass": 1}},
        {"verdict": "banana", "seconds": "NaN", "said": {"a": 1}},
        {"verdict": "warn", "seconds": -1, "said": "x" * 100_000},
    ],
)
def test_an_invalid_burn_in_report_is_a_warning(report: dict[str, object]) -> None:
    fields = _burn_in_fields(report)
    assert fields["burn_in"] == "warn"
    assert fields["burn_in_seconds"] == 0.0
    assert len(json.dumps(fields)) < 1000
