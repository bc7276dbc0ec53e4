"""A job's secrets: in a file of their own while the job lives, in its environment, nowhere else."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from drumline.jobs import Refused
from tests.jobs.world import World, a_world

DRUMLINE = Path(sys.executable).parent / "drumline"
TOKEN = "hf-5b1d8e07c2a94f63"  # noqa: S105 - made up for these tests
# Holds the set-up and the program until a test lets it go on.
SETUP = 'until [ -e "$GATES/setup" ]; do sleep 0.05; done'
RUN = 'printf %s "$TOKEN" | sha256sum\nuntil [ -e "$GATES/run" ]; do sleep 0.05; done\n'


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with a_world(tmp_path_factory.mktemp("town")) as made:
        yield made


def create(world: World, gates: Path, value: str = TOKEN, run: str = RUN) -> str:
    gates.mkdir(exist_ok=True)
    path = world.write_job(
        run,
        accelerator="v4-8",
        setup=SETUP,
        secrets=["TOKEN"],
        environment={"GATES": str(gates)},
        retry={"failures": 0},
    )
    return str(world.client.create(path, environ={"TOKEN": value})["id"])


def places(world: World, value: str) -> list[str]:
    """Every file under the home that holds the value."""
    files = []
    for path in world.files():
        try:
            if value.encode() in path.read_bytes():
                files.append(str(path.relative_to(world.home)))
        except OSError:  # gone meanwhile, or a socket
            continue
    return sorted(files)


def on_hosts(world: World, value: str) -> list[str]:
    return [place for place in places(world, value) if place.startswith("emulator/hosts/")]


def told_of_processes(value: str, what: str = "cmdline") -> list[str]:
    """Processes with the value on their command line, or in their environment."""
    processes = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and value.encode() in (process / what).read_bytes():
                processes.append(process.name)
        except OSError:
            continue
    return processes


def mode(world: World, place: str) -> int:
    return stat.S_IMODE((world.home / place).stat().st_mode)


def hash_of(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def log(world: World, job: str, attempt: int | None = None) -> str:
    return b"".join(world.client.logs(job, attempt=attempt)).decode()


def in_set_up(world: World, job: str) -> None:
    world.until(lambda: "setup" in world.client.show(job)["reason"], what="set-up")


def drumline(world: World, *words: str, **environment: str) -> str:
    done = subprocess.run(
        [DRUMLINE, *words],
        env=os.environ | {"DRUMLINE_HOME": str(world.home)} | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_from_the_creation_to_the_end_a_secret_is_where_it_belongs_and_nowhere_else(
    world: World, tmp_path: Path
) -> None:
    world.emulator("capacity", zone="local-a", accelerator="v4-16", chips=0)
    path = world.write_job(
        RUN,
        setup=SETUP,
        secrets=["TOKEN"],
        zones=["local-a"],
        environment={"GATES": str(tmp_path)},
    )
    # The first command of all: it starts the server, which must not inherit the value.
    output = drumline(world, "create", str(path), "--json", TOKEN=TOKEN)
    job = "000001"
    own = f"secrets/{job}.json"

    def told() -> str:
        shown = drumline(world, "show", job) + drumline(world, "show", job, "--json")
        listed = drumline(world, "list") + drumline(world, "list", "--json")
        return output + shown + listed + json.dumps(world.client.events(job))

    # Before the first attempt, and in a new server.
    world.reaches(job, "WAITING")
    assert places(world, TOKEN) == [own]
    assert mode(world, own) == 0o600
    world.kill_server()
    world.reaches(job, "WAITING")
    assert places(world, TOKEN) == [own]

    world.emulator("capacity", zone="local-a", accelerator="v4-16", chips=None)
    in_set_up(world, job)
    world.until(lambda: len(on_hosts(world, TOKEN)) == 2, what="both hosts in set-up")
    host_files = on_hosts(world, TOKEN)
    assert {Path(place).name for place in host_files} == {"secrets.json"}
    assert {mode(world, place) for place in host_files} == {0o600}
    assert places(world, TOKEN) == sorted([own, *host_files])
    assert told_of_processes(TOKEN) == []
    assert TOKEN not in told()

    (tmp_path / "setup").touch()
    world.reaches(job, "RUNNING")
    world.until(lambda: hash_of(TOKEN) in log(world, job), what="the program to see it")
    world.until(lambda: not on_hosts(world, TOKEN), what="the hosts to forget it")
    assert places(world, TOKEN) == [own]
    assert told_of_processes(TOKEN) == []
    status = world.client.server_status()
    assert status is not None
    servants = {str(status["pid"]), str(world.emulator("status")["pid"])}
    assert servants.isdisjoint(told_of_processes(TOKEN, "environ"))

    # The next attempt has it too, and so has the next server.
    world.kill_server()
    world.reaches(job, "RUNNING")
    assert places(world, TOKEN) == [own]
    world.emulator("preempt", target=job)
    world.until(lambda: world.client.show(job)["attempts_made"] == 2)
    world.until(lambda: hash_of(TOKEN) in log(world, job, 2), what="the program to see it again")
    (tmp_path / "run").touch()
    assert world.end(job)["status"] == "SUCCEEDED"
    assert places(world, TOKEN) == []
    assert not (world.home / own).exists()
    assert TOKEN not in told()
    world.cloud_is_empty()


@pytest.mark.parametrize("end", ["failed", "cancelled", "deleted", "cleaned"])
def test_a_secret_is_gone_when_the_job_is(town: World, tmp_path: Path, end: str) -> None:
    job = create(town, tmp_path, run=RUN + "exit 3")
    in_set_up(town, job)
    town.until(lambda: bool(on_hosts(town, TOKEN)))
    match end:
        case "failed":
            (tmp_path / "setup").touch()
            (tmp_path / "run").touch()
            assert town.end(job)["status"] == "FAILED"
        case "cancelled":
            # In the middle of its set-up; the slice is kept, what it holds of the secret is not.
            town.client.cancel(job)
            assert town.end(job)["status"] == "CANCELLED"
            assert town.client.show(job)["slice"] is not None
        case "deleted":
            town.client.delete(job)
            assert town.end(job)["status"] == "CANCELLED"
        case "cleaned":
            town.client.clean(job)
    assert not (town.home / "secrets" / f"{job}.json").exists()
    if end == "cancelled":
        assert places(town, TOKEN) == []
        town.client.delete(job)
    town.until(lambda: not places(town, TOKEN), what="the slice to go")


def test_resume_takes_the_secret_from_the_environment_again(town: World, tmp_path: Path) -> None:
    (tmp_path / "setup").touch()
    job = create(town, tmp_path)
    town.until(lambda: hash_of(TOKEN) in log(town, job))
    town.client.cancel(job)
    town.end(job)
    with pytest.raises(Refused, match="secrets: TOKEN not set in this environment"):
        town.client.resume(job, environ={})
    assert town.status(job) == "CANCELLED"
    newer = "hf-the-next-one-0d2f"
    town.client.resume(job, environ={"TOKEN": newer})
    town.until(lambda: hash_of(newer) in log(town, job), what="the new value")
    assert places(town, newer) == [f"secrets/{job}.json"]
    (tmp_path / "run").touch()
    assert town.end(job)["status"] == "SUCCEEDED"
    town.until(lambda: not places(town, newer))


@pytest.mark.parametrize("value", ['it\'s "quoted" $(touch pwned) `id` \\', "two\nlines\n", "-e"])
def test_a_secret_arrives_to_the_letter(town: World, tmp_path: Path, value: str) -> None:
    (tmp_path / "setup").touch()
    (tmp_path / "run").touch()
    job = create(town, tmp_path, value)
    assert town.end(job)["status"] == "SUCCEEDED"
    assert hash_of(value) in log(town, job)
    assert "pwned" not in {path.name for path in town.files()}


def test_a_server_that_died_as_a_job_ended_leaves_no_secret_behind(
    town: World, tmp_path: Path
) -> None:
    (tmp_path / "setup").touch()
    (tmp_path / "run").touch()
    job = create(town, tmp_path)
    assert town.end(job)["status"] == "SUCCEEDED"
    town.client.stop_server()
    left = [town.home / "secrets" / name for name in (f"{job}.json", "000999.json", "000998.new")]
    for file in left:
        file.write_text(json.dumps({"TOKEN": TOKEN}))
    town.client.list()
    town.until(lambda: not any(file.exists() for file in left), what="the leftovers to go")


def test_a_job_without_its_secret_is_not_created(town: World, tmp_path: Path) -> None:
    before = len(town.client.list(all=True))
    path = town.write_job("true", secrets=["NOT_SET_HERE"], workdir=str(tmp_path))
    with pytest.raises(Refused, match="NOT_SET_HERE"):
        town.client.create(path, environ={})
    assert len(town.client.list(all=True)) == before
