"""Complete jobs on the emulator, with server, SSH, agent and programs, and faults of the cloud."""

import json
import random
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from drumline.cloud.emulator import launch
from tests.cases import sampled
from tests.hosts.wheels import wheel
from tests.jobs.installation import Installation, temporary_installation


def history(saved: Path, host: int = 0) -> list[list[object]]:
    """Return the records of a counting job, without an incomplete last line."""
    path = saved / f"history-{host}"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def counted_without_gap(installation: Installation, job: str, steps: int, hosts: int = 2) -> None:
    """Check that no step is skipped and that no two attempts ran at once."""
    for host in range(hosts):
        lines = history(installation.saved(job), host)
        done = [line[2] for line in lines if line[0] == "step"]
        assert set(done) == set(range(1, steps + 1))
        spans: dict[object, list[float]] = defaultdict(list)
        for line in lines:
            assert isinstance(line[3], float)
            spans[line[1]].append(line[3])
        in_order = [spans[attempt] for attempt in sorted(spans, key=str)]
        for earlier, later in pairwise(in_order):
            assert max(earlier) < min(later), "two attempts ran at once"
        # Each attempt resumes from the previous checkpoint, so at most one step is repeated.
        starts = [line[2] for line in lines if line[0] == "start"]
        assert len(done) - len(set(done)) <= len(starts) - 1


def test_a_job_runs_on_every_host_and_leaves_no_resources(shared: Installation) -> None:
    job = shared.create('echo "host $DRUMLINE_HOST of $DRUMLINE_HOSTS in $DRUMLINE_JOB_ID"')
    shown = shared.end(job)
    assert shown["status"] == "SUCCEEDED"
    log = b"".join(shared.client.logs(job, host="all")).decode()
    assert f"[host 0] host 0 of 2 in {job}" in log
    assert f"[host 1] host 1 of 2 in {job}" in log
    shared.cloud_is_empty()


def test_a_job_asks_in_several_zones_and_runs_where_it_is_granted_first(
    shared: Installation,
) -> None:
    for zone in ("local-a", "local-b"):
        shared.emulator("capacity", zone=zone, accelerator="v4-8", chips=0)
    job = shared.count(40, accelerator="v4-8", zones=["local-a", "local-b"])

    def waits_in_both_zones() -> bool:
        requests = shared.client.show(job)["requests"]
        return [one["zone"] for one in requests if one["role"] == "requested"] == [
            "local-a",
            "local-b",
        ]

    shared.until(lambda: len(shared.requests(job)) == 2 and waits_in_both_zones())
    # The requests are made before the cloud's answers to them are read.
    shared.until(lambda: "no capacity in local-a and local-b" in shared.client.show(job)["reason"])
    shared.emulator("capacity", zone="local-b", accelerator="v4-8", chips=None)
    shared.reaches(job, "RUNNING")
    shown = shared.client.show(job)
    assert (shown["zone"], shown["requests"]) == ("local-b", [])
    shared.until(lambda: len(shared.requests(job)) == 1, what="the other request to be deleted")
    shared.emulator("capacity", zone="local-a", accelerator="v4-8", chips=None)
    shared.emulator("preempt", target=job)
    shown = shared.end(job)
    assert (shown["status"], shown["preemptions"]) == ("SUCCEEDED", 1)
    counted_without_gap(shared, job, 40, hosts=1)
    shared.cloud_is_empty()


def test_preempted_while_waiting_in_set_up_and_while_running(shared: Installation) -> None:
    shared.emulator("capacity", zone="local-a", accelerator="v4-8", chips=0)
    job = shared.count(60, accelerator="v4-8", setup="sleep 1", zones=["local-a"])
    shared.reaches(job, "WAITING")
    shared.until(lambda: bool(shared.requests(job)))
    shared.emulator("preempt", target=job)
    shared.until(lambda: shared.client.show(job)["preemptions"] == 1)
    shared.emulator("capacity", zone="local-a", accelerator="v4-8", chips=None)
    shared.until(lambda: "setup" in shared.client.show(job)["reason"], what="set-up")
    shared.emulator("preempt", target=job)
    shared.until(lambda: shared.client.show(job)["preemptions"] == 2)
    shared.until(lambda: len(history(shared.saved(job))) > 20)
    shared.emulator("preempt", target=job)
    shown = shared.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert shown["preemptions"] == 3
    assert shown["failures"] == 0
    counted_without_gap(shared, job, 60, hosts=1)
    shared.cloud_is_empty()


def test_a_second_job_uses_the_environment_of_the_first_one(shared: Installation) -> None:
    python = {"kind": "venv", "requirements": ["--no-index", "--find-links=wheels", "drumline_try"]}
    run = "python -c 'import drumline_try, sys; print(drumline_try.VALUE, sys.prefix)'"
    file = shared.write_job(run, python=python)
    wheel(file.parent / "wheels", "drumline_try", "VALUE = 7\n")
    logs = []
    for _ in range(2):
        job = str(shared.client.create(file)["id"])
        assert shared.end(job)["status"] == "SUCCEEDED"
        logs.append(b"".join(shared.client.logs(job, host="all")).decode().splitlines())
    made = [line for log in logs for line in log if "environment: made " in line]
    assert len(made) == 1, "one of the hosts of the first job has installed it"
    for host in (0, 1):
        assert any(line.startswith(f"[host {host}] environment: reused ") for line in logs[1])
    assert len({line.split()[-1] for log in logs for line in log if "] 7 " in line}) == 1


@pytest.mark.every_case
@pytest.mark.parametrize("seed", range(3))
def test_preempted_three_times_at_random_moments(shared: Installation, seed: int) -> None:
    chance = random.Random(seed)
    # With one request at a time every preemption counts. One lost beside others costs nothing.
    job = shared.count(60, setup="sleep 0.3", ask=1)
    for number in range(3):
        time.sleep(chance.uniform(0.0, 2.5))
        if shared.client.show(job)["ended"] is None:
            shared.until(lambda: bool(shared.emulator("resources")["requests"]))
            shared.emulator("preempt", target=job)
            shared.until(lambda n=number: shared.client.show(job)["preemptions"] > n)  # type: ignore[misc]
    shown = shared.end(job)
    assert shown["status"] == "SUCCEEDED"
    counted_without_gap(shared, job, 60)
    shared.cloud_is_empty()


@pytest.mark.every_case
def test_a_plain_script_survives_a_notice_without_any_allowance(shared: Installation) -> None:
    """The script has no handler, so the SIGTERM of its host's shutdown ends it."""
    job = shared.create("echo attempt $DRUMLINE_ATTEMPT; sleep 600", retry={"failures": 0})
    shared.reaches(job, "RUNNING")
    shared.emulator("preempt", target=job, notice=20.0)
    shared.until(lambda: shared.client.show(job)["preemptions"] == 1, 15, "the notice to be heard")
    shared.until(lambda: shared.client.show(job)["attempts_made"] == 2, 40, "the next attempt")
    shared.reaches(job, "RUNNING")
    assert shared.client.show(job)["failures"] == 0
    shared.client.delete(job)
    shared.cloud_is_empty()


@pytest.mark.every_case
@pytest.mark.long
def test_jobs_survive_repeated_kills_of_the_server(
    installation: Installation,
) -> None:
    chance = random.Random(1)
    jobs = [installation.count(60, accelerator="v4-8", pace=0.1) for _ in range(6)]
    for _ in range(6):
        time.sleep(chance.uniform(0.2, 1.2))
        installation.kill_server()
        installation.client.list()
    for job in jobs:
        shown = installation.end(job)
        assert shown["status"] == "SUCCEEDED"
        assert len(shown["attempts"]) == 1
        starts = [line for line in history(installation.saved(job)) if line[0] == "start"]
        assert len(starts) == 1, "the program was restarted because the server died"
        log = b"".join(installation.client.logs(job)).decode()
        assert log.count("attempt 1 from step 0") == 1
    installation.cloud_is_empty()


FAILURES = {
    "exit 3": ("exit 3", 0, "exit"),
    "a traceback on host 1": (
        'test "$DRUMLINE_HOST" != 1 || python -c "raise ValueError(\'batch 250\')"; sleep 60',
        1,
        "ValueError: batch 250",
    ),
    "out of memory": ('if [ "$DRUMLINE_HOST" = 1 ]; then kill -9 $$; fi; sleep 60', 1, "memory"),
}


@pytest.mark.parametrize("what", sampled(FAILURES, ["a traceback on host 1"]))
def test_a_failing_program_is_retried_and_the_first_host_named(
    shared: Installation, what: str
) -> None:
    run, host, expected = FAILURES[what]
    job = shared.create(run, retry={"failures": 1}, keep=0)
    shown = shared.end(job)
    assert shown["status"] == "FAILED"
    assert [a["outcome"] for a in shown["attempts"]] == ["program failed"] * 2
    if what != "exit 3":
        assert shown["cause"]["host"] == host
    assert expected in shown["cause"]["error"] + shown["reason"]
    assert shown["cause"]["hosts"] == 2
    shared.cloud_is_empty()


@pytest.mark.every_case
@pytest.mark.long
@pytest.mark.parametrize("how", ["silent", "reboot", "vfio"])
def test_a_broken_host_is_replaced_and_never_counts_as_a_failure(
    installation: Installation, how: str
) -> None:
    job = installation.count(80, pace=0.1, retry={"failures": 0})
    installation.reaches(job, "RUNNING")
    installation.until(lambda: len(history(installation.saved(job))) > 5)
    installation.emulator("break", target=job, host=1, how=how)
    shown = installation.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert shown["failures"] == 0
    assert [a["outcome"] for a in shown["attempts"]] == ["bad host", "succeeded"]
    counted_without_gap(installation, job, 80)
    installation.cloud_is_empty()


@pytest.mark.every_case
@pytest.mark.long
def test_a_fifth_of_all_calls_fails_and_the_login_expires(
    installation: Installation, tmp_path: Path
) -> None:
    installation.emulator("faults", fail=0.2)
    gate = tmp_path / "gate"
    environment = {"GATE": str(gate)}
    jobs = [installation.count(20, accelerator="v4-8", environment=environment) for _ in range(4)]
    for job in jobs:
        installation.reaches(job, "RUNNING")
    installation.emulator("faults", fail=0.2, login="expired")
    refused = int(installation.emulator("status")["total"])
    installation.until(
        lambda: int(installation.emulator("status")["total"]) > refused + 12, what="12 refusals"
    )
    assert {installation.status(job) for job in jobs} == {"RUNNING"}
    installation.emulator("faults", fail=0.2, login="ok")
    gate.touch()
    for job in jobs:
        shown = installation.end(job)
        assert shown["status"] == "SUCCEEDED"
        assert len(shown["attempts"]) == 1
        assert shown["preemptions"] == 0
    installation.emulator("faults", clear=True)
    installation.cloud_is_empty()


@pytest.mark.every_case
def test_no_capacity_in_the_first_zone_moves_to_the_next(installation: Installation) -> None:
    installation.emulator("capacity", zone="local-a", accelerator="v4-8", chips=0)
    installation.emulator("capacity", zone="local-b", accelerator="v4-8", chips=0)
    job = installation.create("echo done", accelerator="v4-8", zones=["local-a", "local-b"])
    installation.until(lambda: "no capacity in local-" in installation.client.list()[0]["reason"])
    installation.emulator("capacity", zone="local-b", accelerator="v4-8", chips=None)
    shown = installation.end(job)
    assert shown["status"] == "SUCCEEDED"
    assert shown["attempts"][-1]["zone"] == "local-b"
    installation.cloud_is_empty()


@pytest.mark.every_case
def test_from_the_preemption_to_the_next_first_line_is_no_longer_than_to_the_first(
    installation: Installation,
) -> None:
    created = time.time()
    job = installation.count(200, pace=0.1, accelerator="v4-8")
    installation.until(lambda: len(history(installation.saved(job))) > 3)
    first = next(line[3] for line in history(installation.saved(job)))
    assert isinstance(first, float)
    installation.emulator("preempt", target=job)
    preempted_at = time.time()

    def second_start() -> bool:
        return any(line[0] == "start" and line[1] == 2 for line in history(installation.saved(job)))

    installation.until(second_start)
    started = next(line[3] for line in history(installation.saved(job)) if line[1] == 2)
    assert isinstance(started, float)
    # The first job includes the start of server and emulator. On two idle cores this takes 2 s.
    assert started - preempted_at < 2 * (first - created) + 2


@pytest.mark.every_case
def test_two_servers_in_one_project_leave_each_other_alone(
    installation: Installation, tmp_path: Path
) -> None:
    installation.start_emulator()
    with temporary_installation(tmp_path / "other") as other:
        other.home.mkdir(exist_ok=True)
        (other.home / "config.yaml").write_text(f"endpoint: {installation.home / 'emulator'}\n")
        mine = installation.count(60, accelerator="v4-8", pace=0.1)
        their_job = other.count(60, accelerator="v4-8", pace=0.1)
        assert mine == their_job, "the same job id, to make a clash possible"
        installation.reaches(mine, "RUNNING")
        other.reaches(their_job, "RUNNING")
        nodes = {
            node["name"].rsplit("/")[-1] for node in installation.emulator("resources")["nodes"]
        }
        assert len(nodes) == 2
        other.client.delete(their_job)
        # A request can outlive its node, and the other server is stopped below.
        other.until(lambda: len(installation.resources()) <= 3, what="the other job's to be gone")
        assert installation.end(mine)["status"] == "SUCCEEDED"
    installation.cloud_is_empty()


@pytest.mark.every_case
def test_cancel_keeps_the_slice_resume_goes_on_and_delete_releases(shared: Installation) -> None:
    job = shared.count(100, accelerator="v4-8", pace=0.1)
    shared.until(lambda: len(history(shared.saved(job))) > 3)
    shared.client.cancel(job)
    shown = shared.end(job)
    assert shown["status"] == "CANCELLED"
    assert len(shared.emulator("resources")["nodes"]) == 1
    shared.client.resume(job)
    shared.reaches(job, "RUNNING")
    assert shared.client.show(job)["attempts"][-1]["number"] == 2
    shared.client.delete(job)
    assert shared.end(job)["status"] == "CANCELLED"
    shared.cloud_is_empty()
    counted = [line[2] for line in history(shared.saved(job)) if line[0] == "step"]
    assert counted == sorted(set(counted), key=lambda step: int(str(step)))


def test_a_server_whose_home_was_removed_leaves(shared: Installation) -> None:
    shared.client.list()
    status = shared.client.server_status()
    assert status is not None
    (shared.home / "server.sock").unlink()
    state = Path(f"/proc/{status['pid']}/stat")

    def has_left() -> bool:
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"

    shared.until(has_left, 20, "the server to leave")


def test_a_new_job_brings_back_an_emulator_that_left(shared: Installation) -> None:
    first = shared.create("true", accelerator="v4-8")
    shared.end(first)
    shared.cloud_is_empty()
    launch.stop(shared.home / "emulator")
    second = shared.create("true", accelerator="v4-8")
    assert shared.end(second)["status"] == "SUCCEEDED"
