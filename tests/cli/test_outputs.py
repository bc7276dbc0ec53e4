"""The outputs of a job in `show`, `cp` and `clean`."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., int]
Make = Callable[..., dict[str, Any]]
Printed = pytest.CaptureFixture[str]
NO_SLICE = (409, {"error": "000007 is SUCCEEDED; it holds no slice"})


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The folder of the outputs of job 7, of two hosts."""
    folder = tmp_path / "outputs" / "000007"
    for host in (0, 1):
        (folder / f"host-{host}" / "results").mkdir(parents=True)
        (folder / f"host-{host}" / "results" / "x.csv").write_text(f"host {host}\n")
        (folder / f"host-{host}" / "a.png").write_text("picture")
    return folder


@pytest.fixture
def job(server: Any, a_job: Make, kept: Path) -> dict[str, Any]:
    """Return a job without a slice, with outputs of two hosts, the second of them incomplete."""
    host: dict[str, Any] = {
        "copied_at": 1_700_000_000.0,
        "error": "",
        "left_out": 0,
        "problems": [],
    }
    outputs = {
        "paths": ["results/", "*.png"],
        "folder": str(kept),
        "files": 4,
        "bytes": 32,
        "copied_at": 1_700_000_000.0,
        "attempt": 1,
        "hosts": [
            {"index": 0, **host},
            {"index": 1, **host, "error": "the host cannot be reached"},
        ],
        "problems": ["host 1: the host cannot be reached"],
    }
    new = a_job("000007", status="SUCCEEDED", outputs=outputs, slice=None, chips_held=0)
    server.holds(new)
    server.answers["GET /jobs/000007/hosts"] = NO_SLICE
    return new


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_show_prints_where_the_outputs_are_and_what_is_missing(
    job: dict[str, Any], drumline: Run, capsys: Printed
) -> None:
    assert drumline("show", "7") == 0
    out = capsys.readouterr().out
    assert f"outputs  4 files, 32 B, in {job['outputs']['folder']}, copied at " in out
    assert "\n         host 1: the host cannot be reached\n" in out


def test_show_prints_that_no_file_matches(
    job: dict[str, Any], drumline: Run, capsys: Printed
) -> None:
    job["outputs"] |= {"files": 0, "hosts": [], "problems": []}
    assert drumline("show", "7") == 0
    line = "outputs  no file of the job matches results/, *.png, checked at "
    assert line in capsys.readouterr().out


def test_show_prints_that_nothing_was_copied_yet(
    job: dict[str, Any], drumline: Run, capsys: Printed
) -> None:
    job["outputs"] |= {"files": 0, "copied_at": None, "hosts": [], "problems": []}
    assert drumline("show", "7") == 0
    assert "outputs  results/, *.png: not copied yet\n" in capsys.readouterr().out


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("7:results/x.csv .", {"x.csv"}),
        ("7:./results//x.csv y.csv", {"y.csv"}),
        ("7:results .", {"results/x.csv"}),
        ("7:results/ other", {"other/x.csv"}),
        ("7:results/*.csv .", {"x.csv"}),
        ("7:a.png new/folder/", {"new/folder/a.png"}),
        ("7:. .", {"a.png", "results/x.csv"}),
        ("7:a.png . --host all", {"host-0/a.png", "host-1/a.png"}),
        (
            "7:. all --host all",
            {f"all/host-{n}/{f}" for n in (0, 1) for f in ("a.png", "results/x.csv")},
        ),
    ],
)
def test_cp_copies_outputs_if_the_slice_is_gone(
    drumline: Run, here: Path, words: str, expected: set[str]
) -> None:
    assert drumline("cp", *words.split()) == 0
    assert files(here) == expected


@pytest.mark.usefixtures("job", "here")
def test_cp_prints_what_it_copied_from_when_and_what_is_missing(
    drumline: Run, capsys: Printed
) -> None:
    assert drumline("cp", "7:results/x.csv", ".", "--host", "1") == 0
    out = capsys.readouterr().out
    assert out.startswith("copied results/x.csv (1 file) from the outputs of 000007, which came")
    assert out.endswith("; the last copy is not complete: the host cannot be reached\n")
    assert Path("x.csv").read_text() == "host 1\n"


@pytest.mark.parametrize("path", ["train.py", "/etc/passwd", "../host-1/a.png", "~/a.png", ".."])
def test_cp_of_another_file_names_what_was_kept(
    job: dict[str, Any], drumline: Run, capsys: Printed, here: Path, path: str
) -> None:
    assert drumline("cp", f"7:{path}", ".") == 2
    assert capsys.readouterr().err == (
        f"000007 is SUCCEEDED and holds no slice, and {path} of host 0 was never copied;"
        f" outputs: [results/, *.png] kept 4 files in {job['outputs']['folder']}\n"
    )
    assert files(here) == set()


@pytest.mark.usefixtures("here")
def test_cp_without_outputs_names_the_key(
    job: dict[str, Any], drumline: Run, capsys: Printed
) -> None:
    job["outputs"] = None
    assert drumline("cp", "7:out.txt", ".") == 2
    assert capsys.readouterr().err == (
        "000007 is SUCCEEDED and holds no slice, so the files of its hosts are gone;"
        " outputs: [out.txt] in the job file keeps them\n"
    )


LOGIN = {"index": 0, "user": "drumline", "ssh_ip": "127.0.0.1", "has_host_key": False}
TO_COME = {"name": "dl-1", "zone": "local-a", "accelerator": "v4-8", "held_since": None}


@pytest.mark.parametrize("hosts", [NO_SLICE, [], [LOGIN]], ids=["booting", "ready", "no key"])
def test_cp_copies_outputs_until_the_hosts_of_the_next_slice_are_connected(
    server: Any,
    job: dict[str, Any],
    drumline: Run,
    capsys: Printed,
    here: Path,
    hosts: Any,
) -> None:
    held_since = None if hosts is NO_SLICE else 1_700_000_000.0
    job |= {"status": "RECOVERING", "slice": TO_COME | {"held_since": held_since}}
    server.answers["GET /jobs/000007/hosts"] = hosts
    assert drumline("cp", "7:results/x.csv", ".") == 0
    assert files(here) == {"x.csv"}
    assert drumline("cp", "7:train.py", ".") == 2
    state = "its hosts are not connected yet" if held_since else "holds no slice"
    assert f"000007 is RECOVERING and {state}, and train.py of host 0" in capsys.readouterr().err
    job["outputs"]["files"] = 0
    assert drumline("cp", "7:results/x.csv", "again.csv") == 2
    refusals = {0: "no host of the slice is ready yet", 1: "host 0 is not connected yet"}
    refusal = refusals[len(hosts)] if held_since else NO_SLICE[1]["error"]
    assert capsys.readouterr().err == f"{refusal}\n"


@pytest.mark.parametrize("code", [0, 1])
def test_cp_names_the_output_of_an_earlier_attempt_that_the_host_does_not_have(
    server: Any,
    job: dict[str, Any],
    drumline: Run,
    capsys: Printed,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    login = LOGIN | {"has_host_key": True, "ssh_port": 22, "key": "k", "known_hosts": "h"}
    server.answers["GET /jobs/000007/hosts"] = [login | {"folder": "work"}]
    job |= {"status": "RUNNING", "slice": TO_COME | {"held_since": 1.0}}
    commands: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        commands.append(command)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr("subprocess.run", run)
    assert drumline("cp", "7:results/x.csv", ".") == code
    assert [command[0] for command in commands] == ["scp"]
    kept = job["outputs"]["folder"]
    hint = f"the outputs of 000007 have it, from an earlier copy: {kept}/host-0/results/x.csv\n"
    assert capsys.readouterr().err == (hint if code else "")
    assert drumline("cp", "7:train.py", ".") == code
    assert capsys.readouterr().err == ""
    assert files(here) == set()


@pytest.mark.usefixtures("here", "job")
def test_cp_to_a_host_without_a_slice_is_refused(drumline: Run, capsys: Printed) -> None:
    Path("in.txt").write_text("x")
    assert drumline("cp", "in.txt", "7:in.txt") == 2
    assert "it holds no slice" in capsys.readouterr().err


@pytest.mark.usefixtures("job")
def test_cp_into_a_folder_that_does_not_exist_copies_nothing(
    server: Any, drumline: Run, capsys: Printed, here: Path
) -> None:
    assert drumline("cp", "7:results/x.csv", "missing/x.csv") == 2
    assert capsys.readouterr().err == (
        "the folder missing does not exist; nothing was copied; a target that ends with / is"
        " created\n"
    )
    (here / "file").write_text("")
    assert drumline("cp", "7:results/x.csv", "file/") == 2
    assert "the folder file/ cannot be created: file exists" in capsys.readouterr().err
    assert files(here) == {"file"}
    assert not [request for request in server.requests if "hosts" in request[1]]


def test_clean_keeps_the_outputs_unless_told_otherwise(
    server: Any, job: dict[str, Any], drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /jobs/000007/clean"] = {"job": job, "text": "done"}
    assert drumline("clean", "7", "--yes") == 0
    assert server.requests[-1][2] == {"outputs": False}
    assert drumline("clean", "7", "--outputs", "--yes") == 0
    assert server.requests[-1][2] == {"outputs": True}
    assert drumline("clean", "7", "--outputs", "--dry-run") == 0
    folder = job["outputs"]["folder"]
    assert f"and delete 4 output files in {folder}" in capsys.readouterr().out
