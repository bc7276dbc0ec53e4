"""Emulated hosts accept logins, and their processes end with them."""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import asyncssh
import pytest
from google.api_core import exceptions

from drumline.cloud.emulator import launch

if TYPE_CHECKING:
    from tests.cloud.conftest import Emulator, Start
else:
    Emulator = Start = Any

SILENCE = 3.0
Host = dict[str, Any]
LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.02)
    return value


def connect(emulator: Emulator, host: Host, **more: Any) -> Any:
    trusted = f"[{host['ip']}]:{host['port']} {host['host_key']}"
    options = {
        "username": "drumline",
        "client_keys": [emulator.key],
        "known_hosts": asyncssh.import_known_hosts(trusted),
        "agent_path": None,
        "config": None,
    }
    return asyncssh.connect(host["ip"], host["port"], **(options | more))


def run(emulator: Emulator, host: Host, command: str, **more: Any) -> Any:
    async def go() -> Any:
        async with connect(emulator, host) as connection:
            return await asyncio.wait_for(connection.run(command, **more), 180)

    return asyncio.run(go())


def start_daemon(emulator: Emulator, host: Host) -> int:
    """Start a process that forks twice and creates its own session. Return its pid."""
    run(emulator, host, "(setsid bash -c 'echo $$ > pid; exec sleep 1000' </dev/null &>log &)")
    home = Path(run(emulator, host, "pwd").stdout.strip())
    return int(until(lambda: (home / "pid").exists() and (home / "pid").read_text()))


def boot_id(emulator: Emulator) -> str:
    (path,) = (emulator.home / "hosts").glob("*/*/dev/boot_id")
    return path.read_text()


def _contains(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


def wait_until_it_answers(emulator: Emulator, host: Host) -> None:
    def answers() -> bool:
        try:
            return bool(run(emulator, host, "true").exit_status == 0)
        except (OSError, asyncssh.Error):
            return False

    until(answers)


@pytest.fixture(scope="module")
def host(emulator: Emulator) -> Iterator[Host]:
    yield emulator.slice("plain", "v5litepod-8", runtime_version="v2-alpha-tpuv5-lite")[0]
    emulator.release("plain")


def test_a_command_gets_its_input_and_returns_output_and_code(
    emulator: Emulator, host: Host
) -> None:
    done = run(emulator, host, "cat; echo oops >&2; exit 7", input="hello")
    assert (done.stdout, done.stderr, done.exit_status) == ("hello", "oops\n", 7)


def test_a_signal_is_distinguished_from_an_exit_code(emulator: Emulator, host: Host) -> None:
    done = run(emulator, host, "kill -TERM $$")
    assert done.exit_signal is not None
    assert done.exit_signal[0] == "TERM"


def test_the_environment_of_a_command(emulator: Emulator, host: Host) -> None:
    shown = run(emulator, host, "env", env={"MINE": "given"}).stdout
    environment = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    home = Path(environment["HOME"])
    assert home.parent.parent == emulator.home / "hosts"
    assert home.stat().st_mode & 0o777 == 0o700
    assert environment["PWD"] == environment["HOME"]
    assert environment["PATH"].startswith(str(Path(sys.executable).parent))
    assert environment["DRUMLINE_EMULATED"] == "1"
    assert environment["DRUMLINE_BUCKETS"] == str(emulator.home / "buckets")
    assert environment["MINE"] == "given"
    assert sorted(
        path.name for path in Path(environment["DRUMLINE_DEV"], "vfio").iterdir()
    ) == list("01234567")


def test_jax_sees_the_chips_of_the_host(emulator: Emulator, host: Host) -> None:
    pytest.importorskip("jax")
    counted = run(emulator, host, "python -c 'import jax; print(jax.device_count())'")
    assert counted.stdout.strip() == "8", counted.stderr


def test_a_terminal_and_files(emulator: Emulator, host: Host) -> None:
    async def go() -> tuple[str, str, str]:
        async with connect(emulator, host) as connection:
            shell = await connection.run(
                "stty size; test -t 0 && echo terminal", term_type="xterm", term_size=(90, 30)
            )
            async with connection.start_sftp_client() as sftp:
                async with sftp.open("put.txt", "w") as put:
                    await put.write("over sftp")
                where = await sftp.realpath(".")
            read = await connection.run("cat put.txt")
            return str(shell.stdout), str(where), str(read.stdout)

    shown, where, read = asyncio.run(go())
    assert shown.split() == ["30", "90", "terminal"]
    assert Path(where).parent.parent == emulator.home / "hosts"
    assert read == "over sftp"


def test_many_commands_at_once_over_one_connection(emulator: Emulator, host: Host) -> None:
    async def go() -> list[str]:
        async with connect(emulator, host) as connection:
            done = await asyncio.gather(*(connection.run(f"echo {n}") for n in range(40)))
            return [str(one.stdout).strip() for one in done]

    assert asyncio.run(go()) == [str(n) for n in range(40)]


@pytest.mark.parametrize("who", ["stranger", "drumline"])
def test_only_the_keys_in_the_metadata_may_log_in(emulator: Emulator, host: Host, who: str) -> None:
    other = asyncssh.generate_private_key("ssh-ed25519")
    key = other if who == "drumline" else emulator.key

    async def go() -> None:
        async with connect(emulator, host, username=who, client_keys=[key]):
            pass

    with pytest.raises(asyncssh.PermissionDenied):
        asyncio.run(go())


def test_guest_attributes_have_the_host_keys(emulator: Emulator, host: Host) -> None:
    got = emulator.client().get_guest_attributes(
        request={"name": "projects/p/locations/local-a/nodes/plain", "query_path": "hostkeys/"}
    )
    items = [entry.query_value.items[0] for entry in got.guest_attributes]
    assert [(one.namespace, one.key, one.value) for one in items] == [
        ("hostkeys", *host["host_key"].split())
    ]


def test_a_slice_whose_hosts_still_boot_is_released_at_once(start_emulator: Start) -> None:
    emulator = start_emulator(boot_seconds=1000.0)
    emulator.ask("slow")
    emulator.wait_for("slow", "PROVISIONING")
    emulator.release("slow")
    assert emulator.control("resources") == {"requests": [], "nodes": [], "hosts": []}
    assert list((emulator.home / "hosts").iterdir()) == []


@LINUX
def test_a_program_outlives_its_connection_but_not_its_host(emulator: Emulator) -> None:
    host = emulator.slice("mortal")[0]
    daemon = start_daemon(emulator, host)
    assert alive(daemon)
    emulator.control("preempt", target="mortal")
    emulator.wait_for("mortal", "SUSPENDED")
    assert not alive(daemon)
    assert not any("mortal" in path.name for path in (emulator.home / "hosts").iterdir())
    with pytest.raises(ConnectionRefusedError):
        run(emulator, host, "true")
    emulator.release("mortal")


@LINUX
def test_a_killed_emulator_leaves_no_processes(start_emulator: Start) -> None:
    emulator = start_emulator()
    hosts = emulator.slice("orphan", "v4-16")
    daemons = [start_daemon(emulator, host) for host in hosts]
    emulator.control("break", target="orphan", host=1, how="silent")
    emulator.control("break", target="orphan", host=1, how="lies")
    os.kill(emulator.control("status")["pid"], signal.SIGKILL)
    gone = [*daemons, *(host["pid"] for host in hosts)]
    until(lambda: not any(map(alive, gone)))
    assert launch.endpoint(emulator.home) is None
    again = start_emulator()
    assert again.control("resources") == {"requests": [], "nodes": [], "hosts": []}
    assert list((emulator.home / "hosts").iterdir()) == []
    assert not (emulator.home / "machines").exists()


@LINUX
def test_a_silent_host_hangs_while_its_program_continues(emulator: Emulator) -> None:
    host = emulator.slice("mute")[0]
    daemon = start_daemon(emulator, host)

    async def go() -> None:
        async with connect(emulator, host, keepalive_interval=0.2, keepalive_count_max=3) as link:
            emulator.control("break", target="mute", host=0, how="silent")
            with pytest.raises((asyncssh.Error, TimeoutError)):
                await asyncio.wait_for(link.run("true"), SILENCE)
        with pytest.raises((asyncssh.Error, TimeoutError)):
            await asyncio.wait_for(connect(emulator, host), 1)

    asyncio.run(go())
    assert alive(daemon)
    emulator.control("break", target="mute", host=0, how="heal")
    wait_until_it_answers(emulator, host)
    emulator.release("mute")


@LINUX
def test_a_host_accepts_logins_after_its_boot_and_a_reboot_ends_its_program(
    start_emulator: Start,
) -> None:
    emulator = start_emulator(boot_seconds=0.5)
    host = emulator.slice("again")[0]
    assert run(emulator, host, "echo in").stdout == "in\n"  # as soon as the slice is active
    daemon = start_daemon(emulator, host)
    before = boot_id(emulator)
    emulator.control("break", target="again", host=0, how="reboot")
    assert not alive(daemon)
    with contextlib.suppress(ConnectionError, asyncssh.Error):  # while it is down
        run(emulator, host, "true")
        assert boot_id(emulator) != before
    wait_until_it_answers(emulator, host)  # same port, same host key
    assert run(emulator, host, "cat pid").stdout.strip() == str(daemon)


@LINUX
def test_a_host_that_loses_its_chip_ends_its_program(emulator: Emulator) -> None:
    host = emulator.slice("sick")[0]
    daemon = start_daemon(emulator, host)
    opens = "exec 3<$DRUMLINE_DEV/vfio/0"
    assert run(emulator, host, opens).exit_status == 0
    emulator.control("break", target="sick", host=0, how="vfio")
    until(lambda: not alive(daemon))
    assert (
        "Failed to initialize TPU system: open(/dev/vfio/0)"
        in run(emulator, host, "cat log").stdout
    )
    assert run(emulator, host, opens).exit_status != 0
    emulator.control("break", target="sick", host=0, how="heal")
    assert run(emulator, host, opens).exit_status == 0
    emulator.release("sick")


@LINUX
def test_a_slow_host_runs_its_programs_a_fifth_of_the_time(emulator: Emulator) -> None:
    host = emulator.slice("sluggish")[0]
    daemon = start_daemon(emulator, host)
    emulator.control("break", target="sluggish", host=0, how="slow")

    def stopped() -> bool:
        return Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    until(stopped)
    until(lambda: not stopped())
    emulator.control("break", target="sluggish", host=0, how="heal")
    for _ in range(50):
        assert not stopped()
        time.sleep(0.01)
    emulator.release("sluggish")


def test_a_node_stopped_and_started_keeps_its_disk_and_its_key(emulator: Emulator) -> None:
    client = emulator.client()
    name = "projects/p/locations/local-a/nodes/pause"
    parent = name.rpartition("/nodes/")[0]
    node = emulator.node(metadata=emulator.node()["metadata"] | {"startup-script": "echo boot"})
    client.create_node(parent=parent, node_id="pause", node=node).result(timeout=60)
    before = emulator.host("pause")
    daemon = start_daemon(emulator, before)
    run(emulator, before, "echo kept > note")
    stopped = client.stop_node(request={"name": name}).result(timeout=60)
    assert stopped.state.name == "STOPPED"
    assert not alive(daemon)
    with pytest.raises(exceptions.BadRequest, match="stop is not supported while in state STOPPED"):
        client.stop_node(request={"name": name})
    started = client.start_node(request={"name": name}).result(timeout=60)
    assert started.state.name == "READY"
    after = emulator.host("pause")
    assert after["host_key"] == before["host_key"]
    assert run(emulator, after, "cat note").stdout == "kept\n"
    until(lambda: run(emulator, after, "cat startup-script.log").stdout == "boot\nboot\n")
    client.delete_node(name=name).result(timeout=60)
    assert not any("pause" in path.name for path in (emulator.home / "hosts").iterdir())


@LINUX
def test_a_reset_request_reboots_its_hosts(emulator: Emulator) -> None:
    hosts = emulator.slice("button", "v4-16")
    daemons = [start_daemon(emulator, host) for host in hosts]
    name = "projects/p/locations/local-a/queuedResources/button"
    emulator.client().reset_queued_resource(name=name).result(timeout=60)
    assert emulator.state("button") == "ACTIVE"
    assert not any(map(alive, daemons))
    assert emulator.control("resources")["hosts"][-2:] == hosts  # same ports, same keys
    assert run(emulator, hosts[1], "cat pid").stdout.strip() == str(daemons[1])
    emulator.release("button")


def test_a_startup_script_runs_on_every_host_without_delaying_it(emulator: Emulator) -> None:
    script = "#!/bin/sh\necho $HOME; pwd; no-such-program; sleep 1000"
    metadata = emulator.node()["metadata"] | {"startup-script": script}
    for host in emulator.slice("scripted", "v4-16", metadata=metadata):
        home = run(emulator, host, "pwd").stdout.strip()
        log = Path(home, "startup-script.log")
        until(partial(_contains, log, "not found"))
        assert log.read_text().splitlines()[:2] == [home, home]
    emulator.release("scripted")


@pytest.mark.usefixtures("host")
def test_invalid_controls_are_one_sentence(emulator: Emulator) -> None:
    mistakes: list[tuple[str, dict[str, Any], str]] = [
        ("preempt", {"target": "nobody"}, "nothing is called 'nobody'"),
        ("break", {"target": "plain", "host": 3, "how": "slow"}, "the hosts 0 to 0, not 3"),
        ("break", {"target": "plain", "how": "fire"}, "not by 'fire'"),
        ("capacity", {"zone": "mars", "accelerator": "v4", "chips": 1}, "'mars' is not a zone"),
        ("capacity", {"zone": "local-a", "accelerator": "v9", "chips": 1}, "'v9'"),
        ("capacity", {"zone": "local-a", "accelerator": "v4", "chips": 10**23}, "chips: Input"),
        ("preempt", {"target": "plain", "notice": 1e308}, "notice: Input"),
        ("faults", {"fail": 2}, "fail: Input should be less than or equal to 1"),
    ]
    for verb, fields, says in mistakes:
        with pytest.raises(launch.EmulatorError, match=says):
            emulator.control(verb, **fields)
