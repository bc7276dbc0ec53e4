"""Whole jobs on the emulator: server, SSH, agent, programs; the cloud misbehaves on the way."""

import json
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from drumline.cloud.emulator import launch
from tests.jobs.world import World, a_world


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """One world for the stories that do nothing to it, only to a job and its own slice."""
    with a_world(tmp_path_factory.mktemp("town")) as made:
        yield made


def history(saved: Path, host: int = 0) -> list[list[object]]:
    """What a counting job wrote down; a line that is being written is left out."""
    path = saved / f"history-{host}"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def counted_without_gap(world: World, job: str, steps: int, hosts: int = 2) -> None:
    """No step skipped, none run by two attempts at once."""
    for host in range(hosts):
        lines = history(world.saved(job), host)
        done = [line[2] for line in lines if line[0] == "step"]
        assert set(done) == set(range(1, steps + 1))
        spans: dict[object, list[float]] = defaultdict(list)
        for line in lines:
            assert isinstance(line[3], float)
            spans[line[1]].append(line[3])
        in_order = [spans[attempt] for attempt in sorted(spans, key=str)]
        for earlier, later in pairwise(in_order):
            assert max(earlier) < min(later), "two attempts ran at once"
        # Each attempt goes on from the checkpoint of the one before: at most one step is repeated.
        starts = [line[2] for line in lines if line[0] == "start"]
        assert len(done) - len(set(done)) <= len(starts) - 1


def test_a_job_runs_on_every_host_and_leaves_nothing_behind(town: World) -> None:
    job = town.create('echo "host $DRUMLINE_HOST of $DRUMLINE_HOSTS in $DRUMLINE_JOB_ID"')
    shown = town.end(job)
    assert shown["status"] == "SUCCEEDED"
    log = b"".join(town.client.logs(job, host="all")).decode()
    assert f"[host 0] host 0 of 2 in {job}" in log
    assert f"[host 1] host 1 of 2 in {job}" in log
    town.cloud_is_empty()


def test_preempted_while_waiting_in_set_up_and_while_running(world: World) -> None:
    world.emulator("capacity", zone="local-a", accelerator="v4-16", chips=0)
    job = world.count(60, setup="sleep 1", zones=["local-a"])
    world.reaches(job, "WAITING")
    world.until(lambda: bool(world.emulator("resources")["requests"]))
    world.emulator("preempt", target=job)
    world.until(lambda: world.client.show(job)["preemptions"] == 1)
    world.emulator("capacity", zone="local-a", accelerator="v4-16", chips=None)
    world.until(lambda: "setup" in world.client.show(job)["reason"], what="set-up")
    world.emulator("preempt", target=job)
    world.until(lambda: world.client.show(job)["preemptions"] == 2)
    world.until(lambda: len(history(world.saved(job))) > 20)
    world.emulator("preempt", target=job)
    shown = world.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert shown["preemptions"] == 3
    assert shown["failures"] == 0
    counted_without_gap(world, job, 60)
    world.cloud_is_empty()


@pytest.mark.parametrize("seed", range(3))
def test_preempted_three_times_at_random_moments(town: World, seed: int) -> None:
    chance = random.Random(seed)
    job = town.count(60, setup="sleep 0.3")
    for number in range(3):
        time.sleep(chance.uniform(0.0, 2.5))
        if town.client.show(job)["ended"] is None:
            town.until(lambda: bool(town.emulator("resources")["requests"]))
            town.emulator("preempt", target=job)
            town.until(lambda n=number: town.client.show(job)["preemptions"] > n)  # type: ignore[misc]
    shown = town.end(job)
    assert shown["status"] == "SUCCEEDED"
    counted_without_gap(town, job, 60)
    town.cloud_is_empty()


def test_a_plain_script_survives_a_notice_without_any_allowance(town: World) -> None:
    """It has no handler: the SIGTERM of a host that goes down ends it."""
    job = town.create("echo attempt $DRUMLINE_ATTEMPT; sleep 600", retry={"failures": 0})
    town.reaches(job, "RUNNING")
    town.emulator("preempt", target=job, notice=20.0)
    town.until(lambda: town.client.show(job)["preemptions"] == 1, 15, "the notice to be heard")
    town.until(lambda: town.client.show(job)["attempts_made"] == 2, 40, "the next attempt")
    town.reaches(job, "RUNNING")
    assert town.client.show(job)["failures"] == 0
    town.client.delete(job)
    town.cloud_is_empty()


@pytest.mark.long
def test_the_server_is_killed_again_and_again_and_nobody_notices(world: World) -> None:
    chance = random.Random(1)
    jobs = [world.count(60, accelerator="v4-8", pace=0.1) for _ in range(6)]
    for _ in range(6):
        time.sleep(chance.uniform(0.2, 1.2))
        world.kill_server()
        world.client.list()
    for job in jobs:
        shown = world.end(job)
        assert shown["status"] == "SUCCEEDED"
        assert len(shown["attempts"]) == 1
        starts = [line for line in history(world.saved(job)) if line[0] == "start"]
        assert len(starts) == 1, "the program was restarted because the server died"
        log = b"".join(world.client.logs(job)).decode()
        assert log.count("attempt 1 from step 0") == 1
    world.cloud_is_empty()


FAILURES = {
    "exit 3": ("exit 3", 0, "exit"),
    "a traceback on host 1 of 4": (
        'test "$DRUMLINE_HOST" != 1 || python -c "raise ValueError(\'batch 250\')"; sleep 60',
        1,
        "ValueError: batch 250",
    ),
    "out of memory": ('if [ "$DRUMLINE_HOST" = 2 ]; then kill -9 $$; fi; sleep 60', 2, "memory"),
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_failing_program_is_retried_and_the_first_host_named(town: World, what: str) -> None:
    run, host, expected = FAILURES[what]
    job = town.create(run, accelerator="v4-32", retry={"failures": 1}, keep=0)
    shown = town.end(job)
    assert shown["status"] == "FAILED"
    assert [a["outcome"] for a in shown["attempts"]] == ["program failed"] * 2
    if what != "exit 3":
        assert shown["cause"]["host"] == host
    assert expected in shown["cause"]["error"] + shown["reason"]
    assert shown["cause"]["hosts"] == 4
    town.cloud_is_empty()


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "outcome"), [("silent", "bad host"), ("reboot", "bad host"), ("vfio", "bad host")]
)
def test_a_broken_host_is_replaced_and_never_counts_as_a_failure(
    world: World, how: str, outcome: str
) -> None:
    job = world.count(80, pace=0.1, retry={"failures": 0})
    world.reaches(job, "RUNNING")
    world.until(lambda: len(history(world.saved(job))) > 5)
    world.emulator("break", target=job, host=1, how=how)
    shown = world.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert shown["failures"] == 0
    assert [a["outcome"] for a in shown["attempts"]] == [outcome, "succeeded"]
    counted_without_gap(world, job, 80)
    world.cloud_is_empty()


@pytest.mark.long
def test_a_fifth_of_all_calls_fails_and_the_login_expires(world: World, tmp_path: Path) -> None:
    world.emulator("faults", fail=0.2)
    gate = tmp_path / "gate"
    environment = {"GATE": str(gate)}
    jobs = [world.count(20, accelerator="v4-8", environment=environment) for _ in range(4)]
    for job in jobs:
        world.reaches(job, "RUNNING")
    world.emulator("faults", fail=0.2, login="expired")
    refused = int(world.emulator("status")["total"])
    world.until(lambda: int(world.emulator("status")["total"]) > refused + 12, what="12 refusals")
    assert {world.status(job) for job in jobs} == {"RUNNING"}
    world.emulator("faults", fail=0.2, login="ok")
    gate.touch()
    for job in jobs:
        shown = world.end(job)
        assert shown["status"] == "SUCCEEDED"
        assert len(shown["attempts"]) == 1
        assert shown["preemptions"] == 0
    world.emulator("faults", clear=True)
    world.cloud_is_empty()


def test_no_capacity_in_the_first_zone_moves_to_the_next(world: World) -> None:
    world.emulator("capacity", zone="local-a", accelerator="v4-8", chips=0)
    world.emulator("capacity", zone="local-b", accelerator="v4-8", chips=0)
    job = world.create("echo done", accelerator="v4-8", zones=["local-a", "local-b"])
    world.until(lambda: "no capacity in local-" in world.client.list()[0]["reason"])
    world.emulator("capacity", zone="local-b", accelerator="v4-8", chips=None)
    shown = world.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert shown["attempts"][-1]["zone"] == "local-b"
    world.cloud_is_empty()


def test_from_the_preemption_to_the_next_first_line_is_no_longer_than_to_the_first(
    world: World,
) -> None:
    created = time.time()
    job = world.count(200, pace=0.1, accelerator="v4-8")
    world.until(lambda: len(history(world.saved(job))) > 3)
    first = next(line[3] for line in history(world.saved(job)))
    assert isinstance(first, float)
    world.emulator("preempt", target=job)
    preempted_at = time.time()

    def second_start() -> bool:
        return any(line[0] == "start" and line[1] == 2 for line in history(world.saved(job)))

    world.until(second_start)
    started = next(line[3] for line in history(world.saved(job)) if line[1] == 2)
    assert isinstance(started, float)
    # The first has the server and the emulator to start. On two idle cores this one takes 2 s.
    assert started - preempted_at < 2 * (first - created) + 2


def test_two_servers_in_one_project_leave_each_other_alone(world: World, tmp_path: Path) -> None:
    world.start_emulator()
    with a_world(tmp_path / "other") as other:
        other.home.mkdir(exist_ok=True)
        (other.home / "config.yaml").write_text(f"endpoint: {world.home / 'emulator'}\n")
        mine = world.count(60, accelerator="v4-8", pace=0.1)
        their_job = other.count(60, accelerator="v4-8", pace=0.1)
        assert mine == their_job, "the same job id, to make a clash possible"
        world.reaches(mine, "RUNNING")
        other.reaches(their_job, "RUNNING")
        nodes = {node["name"].rsplit("/")[-1] for node in world.emulator("resources")["nodes"]}
        assert len(nodes) == 2
        other.client.delete(their_job)
        other.until(lambda: len(world.emulator("resources")["nodes"]) == 1)
        assert world.end(mine)["status"] == "SUCCEEDED"
    world.cloud_is_empty()


def test_cancel_keeps_the_slice_resume_goes_on_and_delete_releases(town: World) -> None:
    job = town.count(100, accelerator="v4-8", pace=0.1)
    town.until(lambda: len(history(town.saved(job))) > 3)
    town.client.cancel(job)
    shown = town.end(job)
    assert shown["status"] == "CANCELLED"
    assert len(town.emulator("resources")["nodes"]) == 1
    town.client.resume(job)
    town.reaches(job, "RUNNING")
    assert town.client.show(job)["attempts"][-1]["number"] == 2
    town.client.delete(job)
    assert town.end(job)["status"] == "CANCELLED"
    town.cloud_is_empty()
    counted = [line[2] for line in history(town.saved(job)) if line[0] == "step"]
    assert counted == sorted(set(counted), key=lambda step: int(str(step)))


def test_a_server_whose_home_was_removed_leaves(world: World) -> None:
    world.client.list()
    status = world.client.server_status()
    assert status is not None
    (world.home / "server.sock").unlink()
    state = Path(f"/proc/{status['pid']}/stat")

    def has_left() -> bool:
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"

    world.until(has_left, 20, "the server to leave")


def test_a_new_job_brings_back_an_emulator_that_left(world: World) -> None:
    first = world.create("true")
    world.end(first)
    world.cloud_is_empty()
    launch.stop(world.home / "emulator")
    second = world.create("true")
    assert world.end(second)["status"] == "SUCCEEDED"
