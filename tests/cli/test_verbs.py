import base64
import contextlib
import io
import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

Run = Callable[..., int]
Make = Callable[..., dict[str, Any]]
Printed = pytest.CaptureFixture[str]

JOB = "accelerator: v4-8\nzones: [us-central2-b]\nrun: python train.py\nsecrets: [WANDB_KEY]\n"


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_KEY", "s3cret")
    file = tmp_path / "job.yaml"
    file.write_text(JOB)
    return file


class Terminal(io.StringIO):
    """A person who types."""

    def isatty(self) -> bool:
        return True


# create


def test_create_hands_over_the_job_and_its_secrets_and_says_what_is_next(
    server: Any, a_job: Make, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /jobs"] = (201, a_job("000012", status="QUEUED"))
    assert drumline("create", str(job_file), "--set", "name=mine", "--set", "retry.failures=1") == 0
    [(_, _, sent)] = server.asked
    assert sent["secrets"] == {"WANDB_KEY": "s3cret"}
    assert (sent["spec"]["name"], sent["spec"]["retry"]["failures"]) == ("mine", 1)
    assert "s3cret" not in json.dumps(sent["spec"])
    out = capsys.readouterr().out
    assert out.startswith("● 000012 llama-1b · v4-128 · us-central2-b\n")
    assert "next: drumline follow 000012 · drumline show 000012" in out


def test_create_as_json(
    server: Any, a_job: Make, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /jobs"] = (201, a_job("000012"))
    assert drumline("create", str(job_file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "000012"


def test_a_dry_run_prints_the_plan_and_creates_nothing(
    server: Any, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /plan"] = {"lines": ["would ask for v4-8", "would run: python train.py"]}
    assert drumline("create", str(job_file), "--dry-run") == 0
    assert capsys.readouterr().out == "would ask for v4-8\nwould run: python train.py\n"
    assert [path for _, path, _ in server.asked] == ["/plan"]
    assert "s3cret" not in json.dumps(server.asked)


def test_a_wrong_job_file_creates_nothing_and_says_so(
    server: Any, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    job_file.write_text(JOB + "chekpoint: /x\nzones2: 1\n")
    assert drumline("create", str(job_file)) == 2
    *problems, last = capsys.readouterr().err.splitlines()
    assert last == "nothing was created"
    assert "chekpoint" in problems[0]
    assert "checkpoint" in problems[0]
    assert server.asked == []


def test_a_secret_that_is_not_set_is_named(
    server: Any,
    job_file: Path,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_KEY")
    assert drumline("create", str(job_file)) == 2
    told = "secrets: WANDB_KEY not set in this environment; export it and try again\n"
    assert capsys.readouterr().err == told
    assert server.asked == []


def test_the_servers_refusal_is_passed_on(
    server: Any, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /jobs"] = (400, {"error": "mounts /data: gs://lab-data is in EU"})
    assert drumline("create", str(job_file)) == 2
    assert capsys.readouterr().err == "mounts /data: gs://lab-data is in EU\n"


# wait


def events_of(job: dict[str, Any]) -> dict[str, Any]:
    return {"events": [{"id": 7, "time": 0.0, "kind": "note", "text": ""}], "job": job}


@pytest.mark.parametrize(
    ("statuses", "code"),
    [(["SUCCEEDED", "SUCCEEDED"], 0), (["SUCCEEDED", "FAILED"], 1), (["CANCELLED"], 1)],
)
def test_wait_exits_by_how_the_jobs_ended(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, statuses: list[str], code: int
) -> None:
    ids = [f"{n:06}" for n in range(1, len(statuses) + 1)]
    for one, status in zip(ids, statuses, strict=True):
        server.answers[f"GET /jobs/{one}/events"] = events_of(a_job(one, status=status))
    assert drumline("wait", *ids) == code
    lines = [f"{one} {status}" for one, status in zip(ids, statuses, strict=True)]
    assert capsys.readouterr().out.splitlines() == lines


def test_wait_gives_up_with_124(server: Any, a_job: Make, drumline: Run, capsys: Printed) -> None:
    server.answers["GET /jobs/000001/events"] = events_of(a_job("000001", status="SUCCEEDED"))
    server.answers["GET /jobs/000002/events"] = events_of(a_job("000002"))
    assert drumline("wait", "1", "2", "--timeout", "0.05") == 124
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["000001 SUCCEEDED", "000002 RUNNING"]
    assert captured.err == "still going after 0.05 s: 000002\n"


# resume, cancel, delete, clean


def test_cancel_prints_what_keeping_the_slice_costs(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    server.holds(a_job(), a_job("000005"))
    for one in ("000004", "000005"):
        answer = {"job": {}, "text": f"{one} is being stopped; kept for about $103 an hour"}
        server.answers[f"POST /jobs/{one}/cancel"] = answer
    assert drumline("cancel", "4", "5", "000004") == 0
    assert capsys.readouterr().out.splitlines() == [
        "000004 is being stopped; kept for about $103 an hour",
        "000005 is being stopped; kept for about $103 an hour",
    ]


def test_one_wrong_id_among_several_changes_nothing(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    server.holds(a_job())
    assert drumline("cancel", "4", "99") == 2
    assert drumline("delete", "--yes", "4", "x") == 2
    assert all(method == "GET" for method, _, _ in server.asked)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_what_is_refused_for_one_job_is_done_for_the_others(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    server.holds(a_job(), a_job("000005"))
    server.answers["POST /jobs/000004/clean"] = (409, {"error": "000004 is still stopping"})
    server.answers["POST /jobs/000005/clean"] = {"job": {}, "text": "000005 is gone"}
    assert drumline("clean", "--yes", "4", "5") == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("000005 is gone\n", "000004 is still stopping\n")


def test_resume_takes_the_secrets_from_the_environment_again(
    server: Any, a_job: Make, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    del job_file
    server.holds(a_job(status="FAILED", spec={"secrets": ["WANDB_KEY"]}))
    server.answers["POST /jobs/000004/resume"] = {"job": {}, "text": "000004 goes on"}
    assert drumline("resume", "4") == 0
    assert server.asked[-1][2] == {"secrets": {"WANDB_KEY": "s3cret"}}
    assert capsys.readouterr().out == "000004 goes on\n"


@pytest.mark.parametrize(
    ("verb", "chosen"),
    [
        ("cancel", ["000001"]),
        ("delete", ["000001", "000003"]),
        ("resume", ["000003", "000004"]),
        ("clean", ["000002", "000003", "000004"]),
    ],
)
def test_all_are_those_the_verb_is_for(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, verb: str, chosen: list[str]
) -> None:
    gone = {"chips_held": 0, "progress": None}
    server.holds(
        a_job("000001"),
        a_job("000002", status="SUCCEEDED", **gone),
        a_job("000003", status="CANCELLED"),
        a_job("000004", status="FAILED", **gone),
    )
    for number in range(1, 5):
        done = {"job": {}, "text": f"{number:06}"}
        server.answers[f"POST /jobs/{number:06}/{verb}"] = done
    assert drumline(verb, "--all") == 2
    assert "add --yes" in capsys.readouterr().err
    assert drumline(verb, "--all", "--yes") == 0
    assert capsys.readouterr().out.split() == chosen
    assert drumline(verb, "--all", "--yes", "--json") == 0
    assert [one["text"] for one in json.loads(capsys.readouterr().out)] == chosen
    assert drumline(verb, "--all", "--dry-run", "--json") == 0
    assert list(json.loads(capsys.readouterr().out)) == chosen


@pytest.mark.parametrize("verb", ["wait", "cancel", "delete", "resume", "clean"])
def test_ids_or_all_but_not_both_and_not_nothing(
    server: Any, drumline: Run, capsys: Printed, verb: str
) -> None:
    told = f"{verb}: name the jobs by their ids, or all of them by --all\n"
    for words in ((), ("4", "--all")):
        assert drumline(verb, *words) == 2
        assert capsys.readouterr().err == told
    server.holds()
    assert drumline(verb, "--all", *(() if verb == "wait" else ("--yes",))) == 0
    if verb != "wait":
        assert capsys.readouterr().out == f"there is no job to {verb}\n"


def test_wait_for_all_that_have_not_ended_as_json(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    server.holds(a_job("000001"), a_job("000002", status="FAILED"))
    server.answers["GET /jobs/000001/events"] = events_of(a_job("000001", status="SUCCEEDED"))
    assert drumline("wait", "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"000001": "SUCCEEDED"}


@pytest.mark.parametrize("verb", ["delete", "clean"])
def test_without_a_terminal_to_ask_on_yes_is_needed(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, verb: str
) -> None:
    server.holds(a_job())
    server.answers[f"POST /jobs/000004/{verb}"] = {"job": {}, "text": "done"}
    assert drumline(verb, "4") == 2
    told = f"{verb} asks before it goes on, and there is no terminal to ask on: add --yes\n"
    assert capsys.readouterr().err == told
    assert all(method == "GET" for method, _, _ in server.asked)
    assert drumline(verb, "4", "--yes") == 0
    assert capsys.readouterr().out == "done\n"


@pytest.mark.parametrize(("typed", "done"), [("y", True), ("n", False), ("", False)])
def test_on_a_terminal_delete_tells_the_facts_and_asks(
    server: Any,
    a_job: Make,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    done: bool,
) -> None:
    server.holds(a_job())
    server.answers["POST /jobs/000004/delete"] = {"job": {}, "text": "64 chips are released"}
    monkeypatch.setattr("sys.stdin", Terminal(f"{typed}\n"))
    assert drumline("delete", "4") == (0 if done else 1)
    out = capsys.readouterr().out
    assert "000004 llama-1b is RUNNING at step 18,400; its last checkpoint is step 18,000\n" in out
    assert "this ends it and releases 64 chips in us-central2-b. Go on? [y/N]" in out
    assert ("64 chips are released" in out) == done
    assert ("nothing was changed" in out) != done


@pytest.mark.parametrize(
    ("verb", "changes", "told"),
    [
        ("cancel", {}, "would end the program of 000004 llama-1b (RUNNING at step 18,400) and "
         "keep 64 chips in us-central2-b, about $103 an hour"),
        ("cancel", {"status": "FAILED"}, "would change nothing: 000004 llama-1b is FAILED"),
        ("cancel", {"chips_held": 0, "status": "WAITING", "progress": None},
         "would end 000004 llama-1b (WAITING); it holds no slice"),
        ("delete", {}, "would end 000004 llama-1b (RUNNING at step 18,400) and release 64 chips "
         "in us-central2-b"),
        ("delete", {"status": "FAILED", "chips_held": 0, "progress": None},
         "would change nothing: 000004 llama-1b (FAILED) holds nothing"),
        ("clean", {"status": "CANCELLED"}, "would release 64 chips in us-central2-b and remove "
         "the logs and the record of 000004 llama-1b"),
        ("resume", {"status": "CANCELLED"}, "would start 000004 llama-1b (CANCELLED at step "
         "18,400) again on the 64 chips in us-central2-b it holds"),
        ("resume", {"status": "FAILED", "chips_held": 0, "progress": None},
         "would start 000004 llama-1b (FAILED) again on a new v4-128"),
        ("resume", {}, "would change nothing: 000004 llama-1b is RUNNING"),
    ],
)  # fmt: skip
def test_a_dry_run_tells_and_does_nothing(
    server: Any,
    a_job: Make,
    drumline: Run,
    capsys: Printed,
    verb: str,
    changes: dict[str, Any],
    told: str,
) -> None:
    server.holds(a_job(**changes))
    assert drumline(verb, "4", "--dry-run") == 0
    assert capsys.readouterr().out == told + "\n"
    assert all(method == "GET" for method, _, _ in server.asked)


# logs, exec, ssh


EVIL = b"\x1b]52;c;cm0gLXJmIH4=\x07\x1b]0;title\x07\x1b[31mred\x1b[0m \xff\r\n"


def on_a_terminal(*words: str) -> bytes:
    """What a command writes to a terminal that is its own."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from drumline.cli import main; main()", *words]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs) as child:
        os.close(theirs)
        written = b""
        with contextlib.suppress(OSError):  # what a pty says at its end
            while piece := os.read(ours, 1 << 16):
                written += piece
        os.close(ours)
        assert child.wait() == 0, written
    return written


def test_a_terminal_gets_no_escapes_out_of_a_log_unless_asked(server: Any) -> None:
    server.answers["GET /jobs/000004/logs"] = EVIL
    assert on_a_terminal("logs", "4") == "red \ufffd\r\n".encode()
    assert EVIL.rstrip() in on_a_terminal("logs", "4", "--raw")


def test_a_terminal_gets_no_escapes_out_of_a_command(server: Any) -> None:
    server.answers["POST /jobs/000004/exec"] = frames(wrote(0, EVIL), wrote(0, EVIL, "stderr"))
    assert on_a_terminal("exec", "4", "--", "ls") == "red \ufffd\r\n".encode() * 2
    assert b"\x1b]52" in on_a_terminal("exec", "4", "--raw", "--", "ls")


def test_an_answer_or_a_refusal_cannot_reach_the_terminal(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    evil = EVIL.decode("utf-8", "replace").rstrip()
    server.holds(a_job())
    server.answers["POST /jobs/000004/cancel"] = {"job": {}, "text": evil}
    assert drumline("cancel", "4") == 0
    server.answers["POST /jobs/000004/cancel"] = (409, {"error": evil})
    assert drumline("cancel", "4") == 2
    server.answers["GET /jobs/000004"] = (404, {"error": evil})
    assert drumline("show", "4") == 2
    told = capsys.readouterr()
    assert told.out.splitlines() == ["red \ufffd"]
    assert told.err.splitlines() == ["red \ufffd"] * 2


def test_json_carries_control_characters_escaped(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    name = "\x1b[2J\x9b2J\u202eevil"
    server.holds(a_job(name=name))
    assert drumline("list", "--json") == 0
    out = capsys.readouterr().out
    assert out.replace("\n", "").isprintable()
    assert json.loads(out)[0]["name"] == name


def test_logs_pass_through_raw(server: Any, drumline: Run, capfdbinary: Any) -> None:
    raw = b"\x1b[31mred\x1b[0m \xff\r\n"
    server.answers["GET /jobs/000004/logs"] = raw
    assert drumline("logs", "4", "--host", "all", "--attempt", "2", "--follow") == 0
    assert capfdbinary.readouterr().out == raw
    assert server.asked[0][1] == "/jobs/000004/logs?host=all&attempt=2&follow=1"


def test_logs_ask_for_a_part(
    server: Any, drumline: Run, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    server.answers["GET /jobs/000004/logs"] = b""
    monkeypatch.setattr("drumline.cli.access.time.time", lambda: 1000.0)
    assert drumline("logs", "4", "--tail", "5", "--since", "10m", "-t", "--attempt", "all") == 0
    assert server.asked[0][1] == "/jobs/000004/logs?attempt=all&tail=5&since=400.0&times=1"
    assert drumline("logs", "4", "--since", "soon") == 2
    assert drumline("logs", "4", "--attempt", "0") == 2
    assert capsys.readouterr().err.splitlines() == [
        "--since soon: give how long ago, such as 10m, or a time, such as 14:02",
        "--attempt 0: give a number from 1 on, or all",
    ]


def test_a_host_is_a_number_or_all(server: Any, drumline: Run, capsys: Printed) -> None:
    assert drumline("logs", "4", "--host", "first") == 2
    assert capsys.readouterr().err == "--host first: give a host's number, or all\n"
    assert server.asked == []


def wrote(host: int, data: bytes, stream: str = "stdout") -> dict[str, Any]:
    return {"host": host, "stream": stream, "data": base64.b64encode(data).decode()}


def ended(host: int, code: int | None) -> dict[str, Any]:
    return {"host": host, "exit_code": code}


def frames(*told: dict[str, Any]) -> bytes:
    """What the server tells of a command, with the hosts before and the ends behind it."""
    hosts = sorted({int(one["host"]) for one in told})
    known = {one["host"] for one in told if "exit_code" in one}
    lines = [{"hosts": hosts}, *told, *(ended(host, 0) for host in hosts if host not in known)]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


def test_exec_prefixes_several_hosts_and_ends_like_the_first_that_failed(
    server: Any, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /jobs/000004/exec"] = frames(
        wrote(1, b"n", "stderr"), wrote(0, b"a\nb"), wrote(1, b"o", "stderr"), wrote(0, b"\n"),
        ended(1, 3), ended(0, 0),
    )  # fmt: skip
    assert drumline("exec", "4", "--host", "all", "--", "ls", "-l", "a b") == 3
    captured = capsys.readouterr()
    assert captured.out == "[host 0] a\n[host 0] b\n"
    assert captured.err == "[host 1] no\n"
    assert server.asked[0][2] == {"host": "all", "command": ["ls", "-l", "a b"]}


@pytest.mark.parametrize(("code", "exit_code"), [(0, 0), (-9, 137), (None, 255)])
def test_exec_on_one_host(
    server: Any, drumline: Run, capsys: Printed, code: int | None, exit_code: int
) -> None:
    server.answers["POST /jobs/000004/exec"] = frames(wrote(2, b"hi"), ended(2, code))
    assert drumline("exec", "4", "--host", "2", "--", "echo $HOME | wc") == exit_code
    assert capsys.readouterr().out == "hi"
    assert server.asked[0][2] == {"host": 2, "command": "echo $HOME | wc"}


def test_exec_passes_on_every_byte(server: Any, drumline: Run, capfdbinary: Any) -> None:
    every = bytes(range(256)) * 300
    server.answers["POST /jobs/000004/exec"] = frames(wrote(0, every), wrote(0, b"\xff", "stderr"))
    assert drumline("exec", "4", "--", "cat file") == 0
    assert capfdbinary.readouterr() == (every, b"\xff")


def test_exec_tells_of_a_host_that_was_lost(server: Any, drumline: Run, capsys: Printed) -> None:
    lost = ended(0, None) | {"error": "connection lost"}
    server.answers["POST /jobs/000004/exec"] = frames(lost)
    assert drumline("exec", "4", "--", "ls") == 255
    told = "host 0: connection lost; how the command ended is unknown\n"
    assert capsys.readouterr().err == told


def test_exec_whose_server_goes_away_says_so(server: Any, drumline: Run, capsys: Printed) -> None:
    server.answers["POST /jobs/000004/exec"] = b'{"hosts": [0]}\n'
    assert drumline("exec", "4", "--", "ls") == 2
    assert capsys.readouterr().err == "the server went away before the command had ended\n"


def test_exec_as_json(server: Any, drumline: Run, capsys: Printed) -> None:
    told = frames(wrote(0, b"a\xff"), wrote(0, b"\n"), wrote(0, b"b\n", "stderr"), ended(0, 3))
    server.answers["POST /jobs/000004/exec"] = told
    assert drumline("exec", "4", "--json", "--", "ls") == 3
    assert json.loads(capsys.readouterr().out) == [
        {"host": 0, "exit_code": 3, "stdout": "a\ufffd\n", "stderr": "b\n"}
    ]


FILES = {"key": "/h/my home/id", "known_hosts": "/h/my home/100%"}
CHECKED = (
    '-i /h/my home/id -o Port=2201 -o User=drumline -o UserKnownHostsFile="/h/my home/100%%" '
    "-o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
)


def a_host(index: int = 1) -> dict[str, Any]:
    where = {"ssh_ip": "127.0.0.1", "ssh_port": 2201, "user": "drumline", **FILES}
    return {"index": index, "folder": ".drumline/work/000004/abc", **where}


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command lines this process turned into."""
    lines: list[str] = []
    monkeypatch.setattr("os.execvp", lambda _, arguments: lines.append(" ".join(arguments)))
    return lines


def test_ssh_becomes_the_ssh_command_with_our_key_and_the_pinned_host_key(
    server: Any, drumline: Run, capsys: Printed, became: list[str]
) -> None:
    server.answers["GET /jobs/000004/hosts"] = [a_host()]
    assert drumline("ssh", "4", "--host", "1") == 0
    assert became == [f"ssh {CHECKED} -- 127.0.0.1"]
    assert drumline("ssh", "4") == 2
    assert capsys.readouterr().err == "--host 0: the slice has hosts 1\n"


@pytest.mark.parametrize(
    ("words", "options", "command"),
    [
        ("-L 6006:localhost:6006", "-L 6006:localhost:6006", ""),
        ("-NL6006:localhost:6006", "-NL6006:localhost:6006", ""),
        ("-N -L 1:a:1 -D 1080", "-N -L 1:a:1 -D 1080", ""),
        ("-t htop", "-t", "htop"),
        ("-o ServerAliveInterval=5 -- ls -l", "-o ServerAliveInterval=5", "ls -l"),
        ("-- ls -l", "", "ls -l"),
        ("nvidia-smi -L", "", "nvidia-smi -L"),
    ],
)
def test_ssh_passes_on_its_own_options_and_a_command(
    server: Any, drumline: Run, became: list[str], words: str, options: str, command: str
) -> None:
    server.answers["GET /jobs/000004/hosts"] = [a_host(0), a_host(1)]
    assert drumline("ssh", "4", "--host", "1", *words.split()) == 0
    [line] = became
    before, _, behind = line.partition(" -- 127.0.0.1")
    assert before == f"ssh {CHECKED} {options}".rstrip()
    assert behind.strip() == command


@pytest.mark.parametrize(
    ("words", "copied"),
    [
        ("4:out.txt .", "drumline@127.0.0.1:.drumline/work/000004/abc/out.txt ."),
        ("000004:/tmp/x y/", "drumline@127.0.0.1:/tmp/x ./y/"),
        ("4:~/notes n", "drumline@127.0.0.1:notes ./n"),
        ("a:b.txt 4:~", "./a:b.txt drumline@127.0.0.1:."),
        ("/usr 4:in", "/usr drumline@127.0.0.1:.drumline/work/000004/abc/in"),
    ],
)
def test_cp_copies_from_and_to_a_host(
    server: Any,
    drumline: Run,
    became: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    copied: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a:b.txt").touch()
    server.answers["GET /jobs/000004/hosts"] = [a_host(0), a_host(1)]
    assert drumline("cp", *words.split()) == 0
    assert became == [f"scp -r {CHECKED} -- {copied}"]


def test_cp_to_and_from_all_hosts(
    server: Any, drumline: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["GET /jobs/000004/hosts"] = [a_host(0), a_host(1)]
    ran: list[list[str]] = []

    def run(command: list[str], check: bool) -> subprocess.CompletedProcess[str]:
        assert not check
        ran.append(command)
        return subprocess.CompletedProcess(command, 0 if len(ran) == 1 else 3)

    monkeypatch.setattr("subprocess.run", run)
    assert drumline("cp", "4:log", str(tmp_path / "logs"), "--host", "all") == 3
    assert [command[-1] for command in ran] == [str(tmp_path / f"logs/host-{n}") for n in (0, 1)]
    assert (tmp_path / "logs" / "host-1").is_dir()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("a", "b"), "one of FROM and TO is on a host: write it as ID:PATH, such as 12:out.txt"),
        (("4:a", "5:b"), "one of FROM and TO is on a host"),
        (("no file", "4:a"), "no file is not there; nothing was copied"),
        (("4:", "b"), "4: names no file; 4:. is the folder the program runs in"),
        (("4:a", "b", "--host", "x"), "--host x: give a host's number, or all"),
        (("4:a", "b", "--host", "7"), "--host 7: the slice has hosts 0 to 1"),
    ],
)
def test_what_cp_cannot_do_is_said(
    server: Any,
    drumline: Run,
    capsys: Printed,
    became: list[str],
    words: tuple[str, ...],
    told: str,
) -> None:
    server.answers["GET /jobs/000004/hosts"] = [a_host(0), a_host(1)]
    assert drumline("cp", *words) == 2
    assert capsys.readouterr().err.startswith(told)
    assert became == []


# the server, and the whole


def test_server_status_and_stop_start_nothing(home: Path, drumline: Run, capsys: Printed) -> None:
    assert drumline("server", "status") == 1
    assert capsys.readouterr().out.startswith(f"no server runs in {home}")
    assert drumline("server", "status", "--json") == 1
    assert json.loads(capsys.readouterr().out) is None
    assert drumline("server", "stop") == 0
    assert not list(home.iterdir())


def test_server_status_tells_which_runs(server: Any, drumline: Run, capsys: Printed) -> None:
    assert drumline("server", "status") == 0
    out = capsys.readouterr().out
    assert "pid 4242" in out
    assert str(server.home) in out
    assert "the emulator on this machine" in out


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"leaves_in": 1500.0, "stays": False}, "leaves   in 25 min if nothing is asked of it"),
        ({"leaves_in": None, "stays": True}, "leaves   not while a job lives or a slice is held"),
        ({"leaves_in": None, "stays": False}, "leaves   not by itself"),
    ],
)
def test_server_status_says_when_it_leaves(
    server: Any, drumline: Run, capsys: Printed, facts: dict[str, Any], told: str
) -> None:
    server.answers["GET /status"] |= facts
    assert drumline("server", "status") == 0
    assert told in capsys.readouterr().out


def test_what_a_leaving_server_turned_away_is_asked_of_the_next(
    server: Any, drumline: Run, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    answers = [(503, {"error": "leaving"}), (200, {"job": {}, "text": "done"})]
    server.answers["POST /jobs/000004/cancel"] = lambda *_: answers.pop(0)
    started: list[bool] = []
    monkeypatch.setattr("drumline.jobs.caller.Caller.start", lambda _: started.append(True))
    assert drumline("cancel", "4") == 0
    assert capsys.readouterr().out == "done\n"
    assert started == [True]


def test_another_version_of_the_server_is_mentioned_once(
    server: Any, drumline: Run, capsys: Printed
) -> None:
    server.holds()
    server.version = "0.0.7"
    assert drumline("list") == 0
    captured = capsys.readouterr()
    assert captured.err.count("version 0.0.7") == 1
    assert len(captured.err.splitlines()) == 1


def test_a_server_that_fails_is_one_sentence(server: Any, drumline: Run, capsys: Printed) -> None:
    server.answers["GET /jobs"] = (500, b"Internal Server Error")
    assert drumline("list") == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert "server.log" in told


def test_help_lists_every_command_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from drumline.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'httpx', 'asyncssh', 'google', 'rich', 'pydantic', 'starlette', 'yaml'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    shown = {line.split()[0] for line in ended.stdout.splitlines() if line.startswith("  ")}
    assert shown >= {"create", "list", "show", "plot", "logs", "wait", "resume", "cancel", "delete",
                     "clean", "ssh", "cp", "exec", "server", "init", "emulator",
                     "chips"}  # fmt: skip


@pytest.mark.parametrize("group", [(), ("server",), ("emulator",)])
def test_help_cuts_no_summary(drumline: Run, capsys: Printed, group: tuple[str, ...]) -> None:
    assert drumline(*group, "--help") == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert not [line for line in lines if line.endswith("...")]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["ca"], ["cancel"]),
        (["server", "sto"], ["stop"]),
        (["list", "--sta"], ["--status"]),
        (["show", ""], ["000005", "000004"]),
        (["show", "000004", ""], []),
        (["cancel", "000004", "0"], ["000005"]),
        (["create", ""], []),
        (["nothing", ""], []),
    ],
)
def test_what_a_shell_offers_behind_what_was_typed(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, words: list[str], found: list[str]
) -> None:
    server.holds(a_job(), a_job("000005"))
    assert drumline("completion", "words", "--", *words) == 0
    assert capsys.readouterr().out.splitlines() == found


def test_completion_starts_no_server(home: Path, drumline: Run, capsys: Printed) -> None:
    assert drumline("completion", "words", "--", "show", "") == 0
    assert capsys.readouterr().out == ""
    assert not list(home.iterdir())


def test_bash_completes(server: Any, a_job: Make) -> None:
    server.holds(a_job())
    script = """
    PATH="$(dirname "$1"):$PATH"
    eval "$(drumline completion bash)"
    COMP_WORDS=(drumline logs 0) COMP_CWORD=2
    _drumline drumline 0 logs
    echo "${COMPREPLY[@]}"
    """
    command = ["bash", "-c", script, "bash", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "000004\n"


def run_alone(*words: str, **files: Any) -> tuple[int, str]:
    """Exit code and stderr of the command line in a process of its own."""
    command = [sys.executable, "-c", "from drumline.cli import main; main()", *words]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, **files)
    return ended.returncode, ended.stderr


def test_a_shell_nobody_knows_is_one_sentence(home: Path) -> None:
    told = "completion: 'tcsh' is none of bash, zsh, fish\n"
    assert run_alone("completion", "tcsh") == (2, told)
    assert not list(home.iterdir())


@pytest.mark.parametrize("seconds", ["nan", "inf", "1e300"])
def test_a_wait_without_an_end_in_sight_is_refused(
    server: Any, drumline: Run, capsys: Printed, seconds: str
) -> None:
    assert drumline("wait", "1", "--timeout", seconds) == 2
    assert capsys.readouterr().err.startswith(f"--timeout {float(seconds):g}: give seconds, at")
    assert server.asked == []


VERBS_THAT_PRINT = [("list",), ("show", "4", "--json"), ("logs", "4"), ("exec", "4", "--", "ls")]


@pytest.mark.parametrize("words", VERBS_THAT_PRINT, ids=lambda words: words[0])
def test_output_that_cannot_be_written_is_one_sentence(
    server: Any, a_job: Make, words: tuple[str, ...]
) -> None:
    server.holds(a_job())
    server.answers["GET /jobs/000004/logs"] = b"a line\n"
    server.answers["POST /jobs/000004/exec"] = frames(wrote(0, b"a line\n"))
    with open("/dev/full", "w") as full:
        told = "the output cannot be written: No space left on device\n"
        assert run_alone(*words, stdout=full, stdin=subprocess.DEVNULL) == (1, told)
    reader, writer = os.pipe()
    os.close(reader)
    assert run_alone(*words, stdout=writer, stdin=subprocess.DEVNULL) == (1, "")
    os.close(writer)


def test_a_closed_stdout_is_one_sentence(server: Any) -> None:
    line = f"{sys.executable} -c 'from drumline.cli import main; main([\"list\"])' >&-"
    ended = subprocess.run(["/bin/bash", "-c", line], stderr=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stderr) == (
        1, "stdout is closed: there is nowhere to print to\n"
    )  # fmt: skip
    assert server.asked == []


def test_completion_is_for_shells_we_know(drumline: Run, capsys: Printed) -> None:
    for shell in ("bash", "zsh", "fish"):
        assert drumline("completion", shell) == 0
        assert "completion words" in capsys.readouterr().out
    assert drumline("completion", "tcsh") == 2


def test_every_command_that_prints_speaks_json() -> None:
    """ssh and cp hand over to OpenSSH, `server run` becomes the server: they print nothing."""
    from drumline.cli import COMMANDS, app

    def without(command: Any, name: str) -> list[str]:
        if hasattr(command, "list_commands"):
            parts = command.list_commands(None)
            return [
                one
                for part in parts
                for one in without(command.get_command(None, part), f"{name} {part}".strip())
            ]
        options = {option for parameter in command.params for option in parameter.opts}
        return [] if "--json" in options else [name]

    whole: Any = typer.main.get_command(app)
    assert set(whole.list_commands(None)) == set(COMMANDS)
    assert set(without(whole, "")) == {"ssh", "cp", "server run"}


def test_a_command_there_is_not(drumline: Run, capsys: Printed) -> None:
    assert drumline("cancle") == 2
    assert "'cancel'" in capsys.readouterr().err
