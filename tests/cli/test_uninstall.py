"""`server stop --all` and `clean --home` in homes whose server does not run."""

import fcntl
import json
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from drumline.jobs.client import Client
from drumline.jobs.core.state import Job
from drumline.jobs.folders import Folders
from drumline.jobs.store.records import SliceRow, Store
from tests.jobs.fakes import ZONE

Run = Callable[..., int]
Printed = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_server(home: Path) -> None:
    """A home with one job, and files of every kind."""
    folders = Folders(home)
    (home / "config.yaml").write_text("cloud: emulator\n")
    folders.logs("000001", 1).mkdir(parents=True)
    (folders.logs("000001", 1) / "host-0").write_text("x" * 2000)
    for name in ("buckets/lab/run", "hosts"):
        (folders.emulator / name).mkdir(parents=True)
    (folders.emulator / "buckets/lab/run/40").write_text("y" * 5000)
    add_job(home, "gs://lab/run")


def add_job(home: Path, checkpoint: str) -> None:
    spec = {"run": "true", "capacity": "spot", "checkpoint": checkpoint}
    with closing(Store(home / "jobs.db")) as store:
        store.add("lab", "llama", spec, lambda job_id: Job(job_id, store.owner, (), 1.0))


def request_slice(home: Path, zone: str) -> None:
    with closing(Store(home / "jobs.db")) as store:
        row = SliceRow("dl-1-000001-1", "000001", zone, "v4-8", 1.0, 2.0, None, None)
        store.adopt_orphan(row)


def test_nothing_runs_and_nothing_is_stopped(home: Path, drumline: Run, capsys: Printed) -> None:
    request_slice(home, "local-a")
    assert drumline("server", "stop", "--all") == 0
    assert capsys.readouterr().out == f"nothing runs in {home}\n"
    assert drumline("server", "stop", "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "server": None, "emulator": None, "hosts": 0, "slices": [],
    }  # fmt: skip


def test_a_stopped_server_has_exited(
    drumline: Run, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server gives up its socket and its lock before it exits."""
    with subprocess.Popen(["/bin/sleep", "0.3"]) as server:
        monkeypatch.setattr(Client, "server_status", lambda _: {"pid": server.pid})
        monkeypatch.setattr(Client, "list", lambda _: [])
        monkeypatch.setattr(Client, "stop_server", lambda _: True)
        assert drumline("server", "stop", "--all") == 0
        assert capsys.readouterr().out == f"stopped the server, process {server.pid}\n"
        assert server.poll() == 0


def test_slices_that_cost_money_are_named_with_their_release(
    home: Path, drumline: Run, capsys: Printed
) -> None:
    request_slice(home, ZONE)
    assert drumline("server", "stop", "--all") == 1
    out = capsys.readouterr().out
    assert f"dl-1-000001-1  v4-8 in {ZONE}, about $" in out
    assert "an hour, job 000001" in out
    assert "drumline delete 000001" in out


def test_a_home_is_shown_by_kind_and_deleted_after_a_confirmation(
    home: Path, drumline: Run, capsys: Printed
) -> None:
    (home / "notes.txt").write_text("mine")
    before = sorted(home.rglob("*"))
    assert drumline("clean", "--home", "--dry-run") == 0
    dry_run = capsys.readouterr().out
    assert dry_run.startswith(f"{home}: 1 job, ")
    assert "  logs          2 kB  " in dry_run
    assert "  buckets       5 kB  gs:// of the emulator, with the checkpoints there: lab\n" in (
        dry_run
    )
    assert dry_run.endswith("not deleted: notes.txt in this folder\n")
    assert drumline("clean", "--home") == 2  # there is no terminal to ask
    assert sorted(home.rglob("*")) == before
    assert drumline("clean", "--home", "--yes") == 0
    assert [path.name for path in home.iterdir()] == ["notes.txt"]


def test_a_home_without_other_files_is_gone(home: Path, drumline: Run, capsys: Printed) -> None:
    assert drumline("clean", "--home", "--yes") == 0
    assert not home.exists()
    capsys.readouterr()
    assert drumline("clean", "--home", "--yes") == 0
    assert capsys.readouterr().out == f"there is no folder {home}; nothing to delete\n"


@pytest.mark.parametrize("options", [[], ["--dry-run"], ["--yes"]])
def test_a_home_without_files_of_drumline_is_one_message(
    home: Path, drumline: Run, capsys: Printed, options: list[str]
) -> None:
    assert drumline("clean", "--home", "--yes") == 0
    home.mkdir()
    (home / "notes.txt").write_text("mine")
    capsys.readouterr()
    assert drumline("clean", "--home", *options) == 0
    assert capsys.readouterr().out == f"no files of Drumline are in {home}; nothing to delete\n"


def test_checkpoints_outside_the_home_are_named_and_kept(
    home: Path, drumline: Run, capsys: Printed, tmp_path: Path
) -> None:
    outside = tmp_path / "run"
    outside.mkdir()
    (home / "link").symlink_to(outside)
    add_job(home, str(outside))
    (home / "logs" / "elsewhere").symlink_to(outside)
    (outside / "100").write_text("z")
    assert drumline("clean", "--home", "--yes") == 0
    assert f"not deleted: checkpoints in {outside}\n" in capsys.readouterr().out
    assert (outside / "100").read_text() == "z"


def test_a_home_whose_servers_only_used_the_emulator_has_no_slices_of_google(
    home: Path, drumline: Run, capsys: Printed
) -> None:
    with closing(Store(home / "jobs.db")) as store:
        store.record_cloud("emulator")
    request_slice(home, ZONE)
    assert drumline("server", "stop", "--all") == 0
    assert drumline("clean", "--home", "--yes") == 0
    assert "Google" not in capsys.readouterr().out
    assert not (home / "jobs.db").exists()


def test_slices_of_a_home_that_once_used_google_may_still_be_there(
    home: Path, drumline: Run
) -> None:
    with closing(Store(home / "jobs.db")) as store:
        store.record_cloud("google")
        store.record_cloud("emulator")
    request_slice(home, ZONE)
    assert drumline("clean", "--home", "--yes") == 2
    assert (home / "jobs.db").exists()


def test_slices_of_an_older_release_may_be_on_google(home: Path, drumline: Run) -> None:
    request_slice(home, ZONE)
    with closing(Store(home / "jobs.db")) as store:
        store.record_cloud("emulator")
    assert drumline("clean", "--home", "--yes") == 2
    assert (home / "jobs.db").exists()


@pytest.mark.parametrize("zone", [ZONE, "us-east5-a"])
def test_a_home_with_slices_of_google_is_kept(
    home: Path, drumline: Run, capsys: Printed, zone: str
) -> None:
    request_slice(home, zone)
    before = sorted(home.rglob("*"))
    assert drumline("clean", "--home", "--yes") == 2
    error = capsys.readouterr().err
    assert "drumline delete 000001" in error
    assert error.endswith("nothing was deleted\n")
    assert sorted(home.rglob("*")) == before


@pytest.mark.parametrize("lock", ["server.lock", "emulator/lock"])
def test_a_home_in_use_is_kept(home: Path, drumline: Run, capsys: Printed, lock: str) -> None:
    with (home / lock).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert drumline("clean", "--home", "--yes") == 2
    assert "first run drumline server stop --all" in capsys.readouterr().err
    assert (home / "jobs.db").exists()


def test_a_home_with_an_unreadable_database_is_kept(
    home: Path, drumline: Run, capsys: Printed
) -> None:
    for path in home.glob("jobs.db*"):
        path.write_text("no database" * 1000)
    assert drumline("clean", "--home", "--yes") == 2
    assert "nobody knows which slices its jobs hold" in capsys.readouterr().err
    assert (home / "logs").exists()


def test_a_home_and_jobs_are_not_cleaned_at_once(home: Path, drumline: Run) -> None:
    assert drumline("clean", "--home", "1", "--yes") == 2
    assert drumline("clean", "--home", "--all", "--yes") == 2
    assert (home / "jobs.db").exists()
