"""A job's secrets are only in their own file and in the program's environment."""

import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.jobs import Refused
from tests.cases import rare
from tests.jobs.installation import Installation

DRUMLINE = Path(sys.executable).parent / "drumline"
TOKEN = "hf-5b1d8e07c2a94f63"  # noqa: S105 - made up for these tests
# Blocks the set-up and the program until a test opens the gate.
SETUP = 'until [ -e "$GATES/setup" ]; do sleep 0.05; done'
RUN = 'printf %s "$TOKEN" | sha256sum\nuntil [ -e "$GATES/run" ]; do sleep 0.05; done\n'


def create(installation: Installation, gates: Path, run: str = RUN) -> str:
    gates.mkdir(exist_ok=True)
    path = installation.write_job(
        run,
        accelerator="v4-8",
        setup=SETUP,
        secrets=["TOKEN"],
        environment={"GATES": str(gates)},
        retry={"failures": 0},
    )
    return str(installation.client.create(path, environ={"TOKEN": TOKEN})["id"])


def places(installation: Installation, value: str) -> list[str]:
    """Return every file under the home that contains the value."""
    files = []
    for path in installation.files():
        try:
            if value.encode() in path.read_bytes():
                files.append(str(path.relative_to(installation.home)))
        except OSError:  # deleted meanwhile, or a socket
            continue
    return sorted(files)


def on_hosts(installation: Installation, value: str) -> list[str]:
    return [place for place in places(installation, value) if place.startswith("emulator/hosts/")]


def told_of_processes(value: str, what: str = "cmdline") -> list[str]:
    """Return the processes with the value on their command line, or in their environment."""
    processes = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and value.encode() in (process / what).read_bytes():
                processes.append(process.name)
        except OSError:
            continue
    return processes


def mode(installation: Installation, place: str) -> int:
    return stat.S_IMODE((installation.home / place).stat().st_mode)


def hash_of(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


def log(installation: Installation, job: str, attempt: int | None = None) -> str:
    return b"".join(installation.client.logs(job, attempt=attempt)).decode()


def in_set_up(installation: Installation, job: str) -> None:
    installation.until(lambda: "setup" in installation.client.show(job)["reason"], what="set-up")


def drumline(installation: Installation, *words: str, **environment: str) -> str:
    done = subprocess.run(
        [DRUMLINE, *words],
        env=os.environ | {"DRUMLINE_HOME": str(installation.home)} | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_from_the_creation_to_the_end_a_secret_is_where_it_belongs_and_nowhere_else(
    shared: Installation, tmp_path: Path
) -> None:
    shared.emulator("capacity", zone="local-a", accelerator="v4-16", chips=0)
    path = shared.write_job(
        RUN,
        setup=SETUP,
        secrets=["TOKEN"],
        zones=["local-a"],
        environment={"GATES": str(tmp_path)},
    )
    # The command starts the server, which must not inherit the value.
    shared.client.stop_server()
    output = drumline(shared, "create", str(path), "--json", TOKEN=TOKEN)
    job = str(json.loads(output)["id"])
    own = f"secrets/{job}.json"

    def told() -> str:
        shown = drumline(shared, "show", job) + drumline(shared, "show", job, "--json")
        listed = drumline(shared, "list") + drumline(shared, "list", "--json")
        return output + shown + listed + json.dumps(shared.client.events(job))

    # Before the first attempt, and in a new server.
    shared.reaches(job, "WAITING")
    assert places(shared, TOKEN) == [own]
    assert mode(shared, own) == 0o600
    shared.kill_server()
    shared.reaches(job, "WAITING")
    assert places(shared, TOKEN) == [own]

    shared.emulator("capacity", zone="local-a", accelerator="v4-16", chips=None)
    in_set_up(shared, job)
    shared.until(lambda: len(on_hosts(shared, TOKEN)) == 2, what="both hosts in set-up")
    host_files = on_hosts(shared, TOKEN)
    assert {Path(place).name for place in host_files} == {"secrets.json"}
    assert {mode(shared, place) for place in host_files} == {0o600}
    assert places(shared, TOKEN) == sorted([own, *host_files])
    assert told_of_processes(TOKEN) == []
    assert TOKEN not in told()

    (tmp_path / "setup").touch()
    shared.reaches(job, "RUNNING")
    shared.until(lambda: hash_of(TOKEN) in log(shared, job), what="the program to see it")
    shared.until(lambda: not on_hosts(shared, TOKEN), what="the hosts to forget it")
    assert places(shared, TOKEN) == [own]
    assert told_of_processes(TOKEN) == []
    status = shared.client.server_status()
    assert status is not None
    servants = {str(status["pid"]), str(shared.emulator("status")["pid"])}
    assert servants.isdisjoint(told_of_processes(TOKEN, "environ"))

    # The next attempt and the next server have the value too.
    shared.kill_server()
    shared.reaches(job, "RUNNING")
    assert places(shared, TOKEN) == [own]
    shared.emulator("preempt", target=job)
    shared.until(lambda: shared.client.show(job)["attempts_made"] == 2)
    shared.until(lambda: hash_of(TOKEN) in log(shared, job, 2), what="the program to see it again")
    (tmp_path / "run").touch()
    assert shared.end(job)["status"] == "SUCCEEDED"
    assert places(shared, TOKEN) == []
    assert not (shared.home / own).exists()
    assert TOKEN not in told()
    shared.cloud_is_empty()


@pytest.mark.parametrize("end", ["cleaned", *rare("failed", "cancelled", "deleted")])
def test_a_secret_is_gone_when_the_job_is(shared: Installation, tmp_path: Path, end: str) -> None:
    job = create(shared, tmp_path, run=RUN + "exit 3")
    in_set_up(shared, job)
    shared.until(lambda: bool(on_hosts(shared, TOKEN)))
    match end:
        case "failed":
            (tmp_path / "setup").touch()
            (tmp_path / "run").touch()
            assert shared.end(job)["status"] == "FAILED"
        case "cancelled":
            # During set-up: the slice is kept, but the secret on it is deleted.
            shared.client.cancel(job)
            assert shared.end(job)["status"] == "CANCELLED"
            assert shared.client.show(job)["slice"] is not None
        case "deleted":
            shared.client.delete(job)
            assert shared.end(job)["status"] == "CANCELLED"
        case "cleaned":
            shared.client.clean(job)
    assert not (shared.home / "secrets" / f"{job}.json").exists()
    if end == "cancelled":
        assert places(shared, TOKEN) == []
        shared.client.delete(job)
    shared.until(lambda: not places(shared, TOKEN), what="the slice to go")


def test_resume_takes_the_secret_from_the_environment_again(
    shared: Installation, tmp_path: Path
) -> None:
    (tmp_path / "setup").touch()
    job = create(shared, tmp_path)
    shared.until(lambda: hash_of(TOKEN) in log(shared, job))
    shared.client.cancel(job)
    shared.end(job)
    with pytest.raises(Refused, match="secrets: TOKEN not set in this environment"):
        shared.client.resume(job, environ={})
    assert shared.status(job) == "CANCELLED"
    newer = "hf-the-next-one-0d2f"
    shared.client.resume(job, environ={"TOKEN": newer})
    shared.until(lambda: hash_of(newer) in log(shared, job), what="the new value")
    assert places(shared, newer) == [f"secrets/{job}.json"]
    (tmp_path / "run").touch()
    assert shared.end(job)["status"] == "SUCCEEDED"
    shared.until(lambda: not places(shared, newer))


def test_a_secret_arrives_to_the_letter(shared: Installation) -> None:
    values = {"A": 'it\'s "quoted" $(touch pwned) `id` \\', "B": "two\nlines\n", "C": "-e"}
    run = "".join(f'printf %s "${name}" | sha256sum\n' for name in values)
    path = shared.write_job(run, accelerator="v4-8", secrets=[*values])
    job = str(shared.client.create(path, environ=values)["id"])
    assert shared.end(job)["status"] == "SUCCEEDED"
    for value in values.values():
        assert hash_of(value) in log(shared, job)
    assert "pwned" not in {path.name for path in shared.files()}


def test_a_server_that_died_as_a_job_ended_leaves_no_secret_behind(
    shared: Installation, tmp_path: Path
) -> None:
    (tmp_path / "setup").touch()
    (tmp_path / "run").touch()
    job = create(shared, tmp_path)
    assert shared.end(job)["status"] == "SUCCEEDED"
    shared.client.stop_server()
    left = [shared.home / "secrets" / name for name in (f"{job}.json", "000999.json", "000998.new")]
    for file in left:
        file.write_text(json.dumps({"TOKEN": TOKEN}))
    shared.client.list()
    shared.until(lambda: not any(file.exists() for file in left), what="the leftovers to go")


def test_a_job_without_its_secret_is_not_created(shared: Installation, tmp_path: Path) -> None:
    before = len(shared.client.list(all=True))
    path = shared.write_job("true", secrets=["NOT_SET_HERE"], workdir=str(tmp_path))
    with pytest.raises(Refused, match="NOT_SET_HERE"):
        shared.client.create(path, environ={})
    assert len(shared.client.list(all=True)) == before
