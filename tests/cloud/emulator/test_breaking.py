"""Broken machines stay broken for every node until they are repaired.

Each test uses slices of its own kind, so that no other test uses or breaks its machines.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncssh
import pytest

from tests.cloud.conftest import Emulator, running_emulator
from tests.cloud.emulator.test_hosts import alive, run, start_daemon, until
from tests.cloud.emulator.test_launch import drumline

LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
OPENS = "exec 3<$DRUMLINE_DEV/vfio/0"


@pytest.fixture(scope="module")
def emulator(
    tmp_path_factory: pytest.TempPathFactory, ssh_key: asyncssh.SSHKey
) -> Iterator[Emulator]:
    """An emulator whose machines only these tests use."""
    with running_emulator(tmp_path_factory.mktemp("breaking"), ssh_key) as one:
        yield one


def finds(emulator: Emulator, host: dict[str, Any]) -> tuple[list[str], str]:
    """Return the device files that a command finds, and the devices for JAX."""
    shown = run(emulator, host, "ls -x $DRUMLINE_DEV/vfio; echo $XLA_FLAGS").stdout.splitlines()
    return shown[0].split(), shown[1].rpartition("=")[2]


def faults(emulator: Emulator, kind: str) -> dict[str, list[dict[str, Any]]]:
    """Return the faults of machines of this kind."""
    machines = emulator.control("status")["machines"]
    return {one["name"]: one["faults"] for one in machines if one["name"].startswith(kind)}


def stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_host_knows_its_machine_and_a_bad_machine_is_assigned_again(emulator: Emulator) -> None:
    first = "local-a-v4-4-0"
    (host,) = emulator.slice("first")
    assert host["machine"] == first
    output = run(
        emulator, host, "echo $DRUMLINE_MACHINE; cat $DRUMLINE_MACHINE/physical_host"
    ).stdout
    folder = emulator.home / "machines" / first
    assert output.split() == [str(folder), first]
    done = emulator.control("break", target="first", how="lies", chip=2, from_step=30)
    assert (done["node"], done["host"], done["machine"]) == ("first", 0, first)
    fault = json.loads((folder / "fault.json").read_text())
    assert isinstance(fault.pop("seed"), int)
    assert fault == {"how": "lies", "chip": 2, "from_step": 30}
    (folder / "began").touch()
    emulator.release("first")
    assert [emulator.slice(name)[0]["machine"] for name in ("second", "third")] == [
        "local-a-v4-4-1",
        first,
    ]
    assert faults(emulator, "local-a-v4") == {first: [{"how": "lies", "chip": 2, "from_step": 30}]}
    assert (folder / "began").exists()
    emulator.control("break", target="third", how="heal")
    assert faults(emulator, "local-a-v4") == {}
    assert sorted(path.name for path in folder.iterdir()) == ["physical_host"]


@LINUX
def test_a_machine_may_be_broken_before_its_first_slice(emulator: Emulator) -> None:
    first = "local-a-v6e-4-0"
    for how, chip in (("missing-chip", 1), ("slow", None), ("vfio", None), ("nan", 3)):
        done = emulator.control("break", target=first, how=how, chip=chip)
        assert (done["machine"], done["node"], done["chip"]) == (first, None, chip)
    (host,) = emulator.slice("unlucky", "v6e-4")
    assert faults(emulator, "local-a-v6e") == {
        first: [
            {"how": "nan", "chip": 3, "from_step": 0},
            {"how": "missing-chip", "chip": 1},
            {"how": "slow"},
            {"how": "vfio"},
        ]
    }
    assert finds(emulator, host) == (["0", "2", "3"], "3")
    assert run(emulator, host, OPENS).exit_status != 0
    sluggish = start_daemon(emulator, host)
    until(lambda: stopped(sluggish))
    emulator.control("break", target=first, how="heal")
    assert finds(emulator, host) == (["0", "1", "2", "3"], "4")
    assert run(emulator, host, OPENS).exit_status == 0
    daemon = start_daemon(emulator, host)
    assert alive(daemon)
    assert not stopped(daemon)


def test_a_chip_goes_missing_under_a_host_and_a_reboot_does_not_bring_it_back(
    emulator: Emulator,
) -> None:
    hosts = emulator.slice("pair", "v5p-16")
    emulator.control("break", target="pair", host=1, how="missing-chip", chip=0)
    assert [finds(emulator, host)[1] for host in hosts] == ["4", "3"]
    name = "projects/p/locations/local-a/queuedResources/pair"
    emulator.client().reset_queued_resource(name=name).result(timeout=60)
    assert finds(emulator, hosts[1]) == (["1", "2", "3"], "3")


def test_machines_from_the_command_line(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = "local-a-v2-4-0"
    monkeypatch.setenv("DRUMLINE_EMULATOR", str(emulator.home))
    emulator.slice("mine", "v2-8", labels={"drumline-job": "000007"})
    assert first in drumline("resources")[1]
    assert drumline("break", "7", "--how", "lies", "--chip", "2", "--from-step", "30")[:2] == (
        0,
        "mine host 0: lies (chip 2, from step 30)\n",
    )
    other = "local-b-v4-4-5"
    assert drumline("break", other, "--how", "slow")[:2] == (0, f"{other}: slow\n")
    status = drumline("status")[1].splitlines()
    assert f"machine {first}, host 0 of mine: lies (chip 2, from step 30)" in status
    assert f"machine {other}, not in use: slow" in status
    before = emulator.control("status")["machines"]
    mistakes = [
        (["7", "--how", "fire"], "not by 'fire'"),
        (["7", "--how", "slow", "--from-step", "3"], "slow starts at once"),
        (["7", "--how", "bad-link", "--from-step", "0"], "bad-link starts at once"),
        (["7", "--how", "heal", "--chip", "0"], "heal is not a fault of one chip"),
        (["7", "--how", "nan", "--from-step", "-1"], "there is no step -1"),
        (["7", "--how", "nan", "--chip", "4"], f"{first} has the chips 0 to 3, not 4"),
        (["7", "--how", "nan", "--chip", "-1"], "not -1"),
        (["7", "--host", "1", "--how", "nan"], "has the hosts 0 to 0, not 1"),
        (["local-a-v2-4-9999", "--how", "nan"], "nothing is called 'local-a-v2-4-9999'"),
        ([first, "--host", "0", "--how", "nan"], "leave out --host 0"),
        ([other, "--how", "silent"], f"no host runs on {other} now"),
    ]
    for arguments, says in mistakes:
        code, shown, message = drumline("break", *arguments)
        assert (code, shown, message.count("\n")) == (2, "", 1), message
        assert says in message
    assert emulator.control("status")["machines"] == before
    assert drumline("break", first, "--how", "missing-chip", "--chip", "1")[0] == 0
    code, _, message = drumline("break", "7", "--how", "lies", "--chip", "1")
    assert (code, f"chip 1 of {first} is missing already" in message) == (2, True)
    assert drumline("break", "7", "--how", "heal")[:2] == (0, "mine host 0: heal\n")
    assert faults(emulator, "local-a-v2") == {}
    assert drumline("break", other, "--how", "heal")[:2] == (0, f"{other}: heal\n")
    assert other not in drumline("status")[1]
