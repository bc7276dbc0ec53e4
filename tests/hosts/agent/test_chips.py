"""The chips of a host: unusable ones, their holders, and the log of libtpu."""

import os
import socket
import stat
from pathlib import Path

import pytest

from drumline.hosts.agent.chips import chips_error, holds_chip
from tests.hosts.agent.machine import Machine

BUSY = "open(/dev/{}): Device or resource busy"


@pytest.fixture
def devices(machine: Machine) -> Path:
    folder = machine.home / "dev"
    (folder / "vfio").mkdir(parents=True)
    (folder / "vfio" / "vfio").touch()
    machine.environment["DRUMLINE_DEV"] = str(folder)
    return folder


def break_chip(path: Path) -> None:
    """Replace a device file by a socket, which nobody can open, not even root."""
    path.unlink(missing_ok=True)
    os.mknod(path, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("name", ["vfio/0", "vfio/3", "accel0", "accel3"])
def test_any_chip_that_cannot_be_opened_is_reported(devices: Path, name: str) -> None:
    for index in range(4):
        (devices / f"{name[:-1]}{index}").touch()
    assert chips_error(str(devices)) == ""
    break_chip(devices / name)
    assert chips_error(str(devices)).startswith(f"open(/dev/{name}): ")


def test_a_host_without_chips_has_no_error(tmp_path: Path) -> None:
    assert chips_error(str(tmp_path)) == ""


def test_prepare_reports_a_broken_chip_of_v4(machine: Machine, devices: Path) -> None:
    break_chip(devices / "accel2")
    machine.put("true")
    assert machine.prepared["trouble"].startswith("open(/dev/accel2): ")


@pytest.mark.parametrize("name", ["vfio/1", "accel1"])
def test_a_chip_held_by_another_process_of_the_program_is_named(
    machine: Machine, devices: Path, name: str
) -> None:
    (devices / name).touch()
    hold = f"setsid sleep 60 5<>$DRUMLINE_DEV/{name} & sleep 0.5;"
    ended = machine.finish(f"{hold} echo '{BUSY.format(name)}'; sleep 0.3; exit 1")
    assert "of the program (sleep 60)" in ended["chip_holder"]
    assert ended["chip_error"] == ""


def test_a_holder_that_ends_with_the_program_is_seen_while_it_runs(
    machine: Machine, devices: Path
) -> None:
    (devices / "vfio/1").touch()
    hold = "sleep 60 5<>$DRUMLINE_DEV/vfio/1 & child=$!; sleep 0.3;"
    ended = machine.finish(f"{hold} echo '{BUSY.format('vfio/1')}'; sleep 1; kill $child; exit 1")
    assert "of the program (sleep 60)" in ended["chip_holder"]


def test_a_chip_that_the_agent_cannot_open_either_is_reported(
    machine: Machine, devices: Path
) -> None:
    (devices / "vfio/0").touch()
    machine.put(
        f"rm $DRUMLINE_DEV/vfio/0; ln -s 0 $DRUMLINE_DEV/vfio/0; echo '{BUSY.format('vfio/0')}';"
        " exit 1"
    )
    machine.start()
    ended = machine.ended()
    assert ended["chip_holder"] == ""
    assert ended["chip_error"].startswith("open(/dev/vfio/0): ")


def test_a_chip_that_is_free_afterwards_is_no_error(machine: Machine, devices: Path) -> None:
    (devices / "vfio/0").touch()
    ended = machine.finish(f"echo '{BUSY.format('vfio/0')}'; exit 1")
    assert (ended["chip_holder"], ended["chip_error"], ended["location"]) == ("", "", "")


def test_a_location_comes_from_libtpus_log_and_not_from_the_output(
    machine: Machine, devices: Path
) -> None:
    words = "TPU initialization failed. Physical location: rack7"
    ended = machine.finish(f"echo 'F0101 {words}'; exit 1")
    assert ended["location"] == ""
    (devices / "tpu_logs").mkdir()
    log = "$DRUMLINE_DEV/tpu_logs/tpu_driver.INFO"
    machine.put(
        f"echo 'I0101 Physical location: tpu1:pe0:0' > {log};"
        f"echo 'F0101 bad chip. Physical location: tpu3:pe2:2' >> {log};"
        "echo 'TPU initialization failed'; exit 1",
        attempt=2,
    )
    machine.start()
    assert machine.ended()["location"] == "tpu3:pe2:2"


def test_an_ordinary_failure_has_no_facts_about_chips(machine: Machine, devices: Path) -> None:
    break_chip(devices / "vfio/0")
    machine.put("true")
    ended = machine.finish("echo 'ValueError: no'; exit 1", attempt=2)
    assert "chip_error" not in ended


def test_the_holders_of_chips(devices: Path) -> None:
    (devices / "accel0").touch()
    with socket.socket():
        assert not holds_chip(os.getpid(), str(devices))
        with (devices / "accel0").open():
            assert holds_chip(os.getpid(), str(devices))
