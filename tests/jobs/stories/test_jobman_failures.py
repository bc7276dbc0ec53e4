"""Twenty failures of an earlier job manager that do not occur here.

Cases about calls and time use a fake cloud and a virtual clock. Cases about programs and hosts run
on the emulator; they share one installation and are created together.
"""

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asyncssh
import pytest

from drumline.hosts.session import HostPhase
from drumline.jobs import Client, Refused
from tests.hosts import stand_in
from tests.jobs.fakes import (
    HOUR,
    ServerHarness,
    run_scenario,
)
from tests.jobs.installation import Installation

COUNT_STARTS = 'mkdir -p "$DRUMLINE_CHECKPOINT"; echo start >> "$DRUMLINE_CHECKPOINT/starts"\n'


JOBS = {
    "long": COUNT_STARTS + "sleep 9",
    "once": COUNT_STARTS + "echo done",
    "exit 3": "echo the last words; exit 3",
    "several lines": "python -c 'raise SystemExit(7)'\necho this line must not be reached\n",
    "several lines, the last fails": "true\n(exit 9)\n",
    "says it failed": (
        "echo 'Traceback (most recent call last):'; echo 'RuntimeError: FAILED';"
        " echo 'Failed to initialize TPU system'; echo preempted; exit 0"
    ),
    "says it succeeded": "echo 'Job finished successfully'; echo SUCCEEDED; echo done; exit 5",
}


@pytest.fixture(scope="module")
def jobs(shared: Installation) -> dict[str, str]:
    """Create one job for each program above, all at the same time."""
    return {
        name: shared.create(
            run,
            accelerator="v4-8",
            retry={"failures": 0},
            keep=0,
            checkpoint=f"gs://counts/{'-'.join(name.split())}".replace(",", ""),
        )
        for name, run in JOBS.items()
    }


def starts(shared: Installation, name: str, job: str) -> int:
    """Return the number of starts of a job's program."""
    folder = shared.client.show(job)["checkpoint"].removeprefix("gs://")
    assert folder.startswith(f"counts/{name}/")
    path = shared.home / "emulator" / "buckets" / folder / "starts"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.every_case
def test_01_a_command_is_never_started_a_second_time_beside_the_first(
    shared: Installation, jobs: dict[str, str], tmp_path: Path
) -> None:
    """A command running longer than 300 s is started a second time beside the first."""

    async def an_afternoon(harness: ServerHarness) -> None:
        job = await harness.create()
        await harness.reaches(job, "RUNNING")
        for _ in range(6):
            await asyncio.sleep(HOUR / 2)
            harness.starts(job)[0].connection(there=False)
            await asyncio.sleep(80)
            harness.starts(job)[0].connection(there=True)
        assert len(harness.starts(job)) == 1
        assert harness.status(job) == "RUNNING"
        assert harness.cloud.count("release") == 0

    run_scenario(tmp_path, an_afternoon)
    # A running program that writes nothing for longer than every silence limit of the emulator.
    shown = shared.end(jobs["long"])
    assert shown["status"] == "SUCCEEDED"
    assert shown["ended"] - shown["attempts"][0]["running"] > 8
    assert starts(shared, "long", jobs["long"]) == 1


def test_02_a_command_that_succeeded_is_not_run_again(
    shared: Installation, jobs: dict[str, str]
) -> None:
    """`loop` runs a command that succeeded again, for ever."""
    job = jobs["once"]
    shown = shared.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert len(shown["attempts"]) == 1
    with pytest.raises(Refused, match="has succeeded"):
        shared.client.resume(job)
    shared.kill_server()  # a new server must not start it again
    shared.client.list()
    shared.until(lambda: shared.client.show(jobs["long"])["ended"] is not None)
    assert starts(shared, "once", job) == 1
    assert shared.status(job) == "SUCCEEDED"


def test_03_an_end_is_a_success_a_failure_or_a_cancel(
    shared: Installation, jobs: dict[str, str]
) -> None:
    """There is no succeeded and no failed state: every end reads "finished successfully"."""
    waits = shared.create("sleep 60", accelerator="v4-8")
    shared.client.delete(waits)
    assert shared.end(jobs["once"])["status"] == "SUCCEEDED"
    assert shared.end(jobs["exit 3"])["status"] == "FAILED"
    assert shared.end(waits)["status"] == "CANCELLED"
    ends = [shared.client.show(job)["events"][-1]["kind"] for job in (jobs["once"], waits)]
    assert ends == ["succeeded", "cancelled"]
    assert shared.client.wait([jobs["once"], jobs["exit 3"]]) == {
        jobs["once"]: "SUCCEEDED",
        jobs["exit 3"]: "FAILED",
    }


def test_10_a_run_of_several_lines_keeps_its_exit_code(
    shared: Installation, jobs: dict[str, str]
) -> None:
    """A multi-line `run` loses its exit code, and the task reads completed."""
    shown = shared.end(jobs["several lines"])
    assert shown["status"] == "FAILED"
    assert shown["attempts"][0]["hosts"][0]["exit_code"] == 7
    log = b"".join(shared.client.logs(jobs["several lines"])).decode()
    assert "must not be reached" not in log
    shown = shared.end(jobs["several lines, the last fails"])
    assert shown["status"] == "FAILED"
    assert shown["attempts"][0]["hosts"][0]["exit_code"] == 9


def test_11_no_phrase_in_the_log_overrides_the_exit_status(
    shared: Installation, jobs: dict[str, str]
) -> None:
    """A phrase in the log overrides the exit status."""
    assert shared.end(jobs["says it failed"])["status"] == "SUCCEEDED"
    shown = shared.end(jobs["says it succeeded"])
    assert shown["status"] == "FAILED"
    assert shown["attempts"][0]["hosts"][0]["exit_code"] == 5


@pytest.mark.every_case
def test_12_set_up_is_repeated_on_the_fresh_slice_after_a_preemption(shared: Installation) -> None:
    """Set-up is not repeated on the fresh VM after a preemption."""
    job = shared.create(
        'test -e "$HOME/installed" && echo "attempt $DRUMLINE_ATTEMPT is set up"\n'
        'if [ "$DRUMLINE_ATTEMPT" = 1 ]; then sleep 60; fi',
        setup='echo installing; touch "$HOME/installed"',
        accelerator="v4-16",
        retry={"failures": 0},
    )
    up = b"attempt 1 is set up"
    shared.until(lambda: b"".join(shared.client.logs(job, host="all")).count(up) == 2)
    shared.emulator("preempt", target=job)
    assert shared.end(job)["status"] == "SUCCEEDED"
    for host in (0, 1):
        for attempt in (1, 2):
            log = b"".join(shared.client.logs(job, host=host, attempt=attempt)).decode()
            assert log.count("installing") == 1
            assert f"attempt {attempt} is set up" in log


def test_14_a_second_server_of_the_same_home_exits_at_once(
    shared: Installation,
) -> None:
    """Two users of one checkout run the same task twice."""
    run = COUNT_STARTS + "sleep 2"
    job = shared.create(run, accelerator="v4-8", checkpoint="gs://counts/twice")
    first = shared.client.server_status()
    assert first is not None
    other = subprocess.run(
        [sys.executable, "-m", "drumline.jobs.server"],
        env={"DRUMLINE_HOME": str(shared.home), "PATH": "/usr/bin:/bin"},
        cwd=shared.home,
        timeout=120,
    )
    assert other.returncode == 0
    now = shared.client.server_status()
    assert now is not None
    assert now["pid"] == first["pid"]
    assert shared.end(job)["status"] == "SUCCEEDED"
    assert starts(shared, "twice", job) == 1


@pytest.mark.every_case
@pytest.mark.parametrize(("accelerator", "hosts"), [("v5p-16", 2), ("v5litepod-8", 1)])
def test_15_hosts_are_counted_as_the_cloud_counts_them(
    shared: Installation, accelerator: str, hosts: int
) -> None:
    """Hosts are miscounted for v5p-16 and v5litepod-8."""
    job = shared.create(
        'echo "$DRUMLINE_HOST of $DRUMLINE_HOSTS"; until [ -e "$HOME/go" ]; do sleep 0.05; done',
        accelerator=accelerator,
    )
    shared.reaches(job, "RUNNING")
    node = shared.client.show(job)["slice"]["name"]
    there = [host for host in shared.emulator("resources")["hosts"] if host["node"] == node]
    assert len(there) == len(shared.client.hosts(job)) == hosts
    shared.client.exec(job, "touch ~/go", host="all")
    assert shared.end(job)["status"] == "SUCCEEDED"
    outputs = [b"".join(shared.client.logs(job, host=n)).decode().strip() for n in range(hosts)]
    assert outputs == [f"{n} of {hosts}" for n in range(hosts)]


def test_16_no_private_key_on_a_host_none_without_its_own_key_and_no_file_of_its_touched(
    shared: Installation, tmp_path: Path
) -> None:
    """Private keys are copied to every VM, host keys are not checked, the VM's SSH config is
    overwritten, values go into shells unquoted, tokens go to the logs."""
    setup = "mkdir -p ~/.ssh; test -e ~/.ssh/config || echo 'Host mine' > ~/.ssh/config"
    job = shared.create("sleep 60", setup=setup, accelerator="v4-16")
    shared.reaches(job, "RUNNING")
    shared.kill_server()  # so that every host is connected and observed once more
    shared.until(lambda: "RUNNING" in str(shared.client.show(job)["attempts"][0]["hosts"]))
    name = shared.client.show(job)["slice"]["name"]
    homes = list((shared.home / "emulator" / "hosts").glob(f"{name}-*/*"))
    assert len(homes) == 2
    secret = (shared.home / "ssh" / "id_ed25519").read_bytes().splitlines()[2]
    for home in homes:
        assert {path.name for path in (home / ".ssh").iterdir()} == {"config"}
        assert (home / ".ssh" / "config").read_text() == "Host mine\n"
        files = [path for path in home.rglob("*") if path.is_file()]
        assert len(files) > 5
        assert not [path for path in files if secret in path.read_bytes()]
    assert secret not in (shared.home / "server.log").read_bytes()
    shared.client.delete(job)

    async def another_shows_up_at_its_address() -> None:
        async with asyncio.timeout(120), stand_in.Slice(tmp_path, 1) as slice_:
            session = slice_.session(stand_in.program(run="sleep 60"))
            session.start()
            await stand_in.until(lambda: session.reports()[0].phase is HostPhase.RUNNING, "it runs")
            host = slice_.hosts[0]
            await host.stop()
            host.commands.clear()
            host.host_key = asyncssh.generate_private_key("ssh-ed25519")
            await host.start()
            await stand_in.until(lambda: "host key" in session.reports()[0].detail, "refused")
            assert host.commands == []

    asyncio.run(another_shows_up_at_its_address())


def test_18_parallel_creates_get_ids_and_slices_of_their_own(shared: Installation) -> None:
    """Two parallel creates take the same TPU name."""
    shared.emulator("capacity", zone="local-c", accelerator="v4-8", chips=0)
    path = shared.write_job("true", accelerator="v4-8", zones=["local-c"])
    with ThreadPoolExecutor(6) as several:
        created = list(several.map(lambda _: Client(shared.home).create(path)["id"], range(6)))
    assert len(set(created)) == 6

    def asked() -> list[str]:
        return [one["name"] for one in shared.requests(*created)]

    shared.until(lambda: len(asked()) == 6, what="six requests")
    assert len(set(asked())) == 6
    shared.client.delete(created)
    shared.until(lambda: not asked())


def test_19_list_answers_at_once_while_the_cloud_is_slow(shared: Installation) -> None:
    """`list` holds a global lock through all its cloud calls."""
    job = shared.create("sleep 60", accelerator="v4-8")
    shared.reaches(job, "RUNNING")
    shared.client.list()
    shared.emulator("faults", delay=1.0, seconds=5.0)
    before = shared.emulator("status")["total"]
    try:
        # The deletion takes 5 s, and so do the polls of the zone.
        shared.client.delete(job)
        shared.until(lambda: shared.emulator("status")["total"] > before)
        for _ in range(5):
            began = time.monotonic()
            assert job in {one["id"] for one in shared.client.list()}
            shared.client.show(job)
            assert time.monotonic() - began < 4.0, "it waited for the cloud"
    finally:
        shared.emulator("faults", clear=True)
    shared.end(job)


def test_20_the_output_of_a_failed_program_outlives_its_slice(
    shared: Installation, jobs: dict[str, str]
) -> None:
    """The failed process leaves no trace: its screen is gone with the session."""
    job = jobs["exit 3"]
    shown = shared.end(job)
    shared.until(
        lambda: not [one for one in shared.emulator("resources")["nodes"] if one["job"] == job]
    )
    assert shown["slice"] is None
    assert "the last words" in shown["cause"]["tail"]
    assert "the last words" in shown["attempts"][0]["hosts"][0]["tail"]
    assert b"the last words\n" in b"".join(shared.client.logs(job))
    shared.client.stop_server()
    assert shared.client.show(job)["cause"] == shown["cause"]
    assert b"the last words\n" in b"".join(shared.client.logs(job))
