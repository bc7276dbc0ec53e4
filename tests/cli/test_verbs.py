"""The job commands: their requests, output and exit codes."""

import io
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer import Abort

import drumline.jobs.client as client_module

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
    """A fake terminal with typed answers."""

    def isatty(self) -> bool:
        return True


# create


def test_create_sends_the_job_and_its_secrets(
    server: Any, a_job: Make, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /jobs"] = (201, a_job("000012", status="QUEUED"))
    assert drumline("create", str(job_file), "--set", "name=mine", "--set", "retry.failures=1") == 0
    [(_, _, sent)] = server.requests
    assert sent["secrets"] == {"WANDB_KEY": "s3cret"}
    assert (sent["spec"]["name"], sent["spec"]["retry"]["failures"]) == ("mine", 1)
    assert "s3cret" not in json.dumps(sent["spec"])
    out = capsys.readouterr().out
    assert out.startswith("● 000012 llama-1b · v4-128 · us-central2-b\n")
    assert "next: drumline follow 000012 · drumline show 000012" in out


def test_create_prints_the_files_left_out(
    server: Any, a_job: Make, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    left_out = [{"path": f"{name}.env", "reason": "environment file"} for name in "abcdef"]
    server.answers["POST /jobs"] = (201, a_job("000012") | {"left_out": left_out})
    assert drumline("create", str(job_file)) == 0
    assert (
        "  · left out: a.env (environment file), b.env (environment file), "
        "c.env (environment file), d.env (environment file), and 2 more; "
        "to send one, name it under include\n"
    ) in capsys.readouterr().out
    server.answers["POST /plan"] = {"lines": ["would do"], "left_out": left_out}
    assert drumline("create", str(job_file), "--dry-run", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"lines": ["would do"], "left_out": left_out}


QUESTION = "200.0 MB would be sent to every host"


@pytest.mark.parametrize(
    ("typed", "arguments", "code", "sent"),
    [
        (None, [], 2, [False]),
        (None, ["--yes"], 0, [True]),
        ("y\n", [], 0, [False, True]),
        ("n\n", [], 1, [False]),
    ],
)
def test_create_asks_before_it_sends_large_files(
    typed: str | None,
    arguments: list[str],
    code: int,
    sent: list[bool],
    server: Any,
    a_job: Make,
    job_file: Path,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def create(_: str, body: Any) -> tuple[int, Any]:
        return (201, a_job("000012")) if body["allow_large"] else (413, {"error": QUESTION})

    server.answers["POST /jobs"] = create
    stdin = io.StringIO() if typed is None else Terminal(typed)
    monkeypatch.setattr("sys.stdin", stdin)
    assert drumline("create", str(job_file), *arguments) == code
    assert [body["allow_large"] for _, path, body in server.requests if path == "/jobs"] == sent
    printed = capsys.readouterr()
    assert (QUESTION in printed.out + printed.err) == (arguments == [])


def test_the_progress_of_packing_large_files_is_shown(
    server: Any,
    a_job: Make,
    job_file: Path,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module, "PROGRESS_SECONDS", 0.01)
    asked = threading.Event()

    def create(_: str, body: Any) -> tuple[int, Any]:
        def progress(*_: Any) -> Any:
            asked.set()
            return {"bytes": 120_000_000, "total": 200_000_000}

        server.answers[f"GET /packing/{body['packing']}"] = progress
        assert asked.wait(60)
        return 201, a_job("000012")

    server.answers["POST /jobs"] = create
    assert drumline("create", str(job_file)) == 0
    assert capsys.readouterr().err == "  ▸ packing 120 of 200 MB\n"


def _interrupt_packing(
    server: Any, monkeypatch: pytest.MonkeyPatch, path: str, answer: tuple[int, Any]
) -> list[str]:
    """Press Ctrl-C while code is packed. The request gets its answer after it was cancelled."""
    monkeypatch.setattr(client_module, "PROGRESS_SECONDS", 0.01)
    cancelled, calls = threading.Event(), list[str]()

    def request(_: str, body: Any) -> tuple[int, Any]:
        def cancel(*_: Any) -> Any:
            calls.append("cancel")
            cancelled.set()
            return {"text": "the request is being cancelled"}

        progress = {"bytes": 120_000_000, "total": 200_000_000}
        server.answers[f"POST /packing/{body['packing']}/cancel"] = cancel
        server.answers[f"GET /packing/{body['packing']}"] = progress
        assert cancelled.wait(60)
        return answer

    def press_ctrl_c(*_: Any) -> None:
        raise KeyboardInterrupt

    server.answers[f"POST {path}"] = request
    monkeypatch.setattr("drumline.cli.follow.Screen.progress", press_ctrl_c)
    return calls


CANCELLED = "the command was interrupted; nothing was changed"


def test_ctrl_c_while_code_is_packed_creates_nothing(
    server: Any,
    job_file: Path,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = _interrupt_packing(server, monkeypatch, "/jobs", (409, {"error": CANCELLED}))
    assert drumline("create", str(job_file)) == 130
    assert calls == ["cancel"]
    assert capsys.readouterr().err == f"\n{CANCELLED}\n"


def test_ctrl_c_after_the_job_was_created_names_the_job(
    server: Any,
    a_job: Make,
    job_file: Path,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _interrupt_packing(server, monkeypatch, "/jobs", (201, a_job("000012")))
    assert drumline("create", str(job_file), "--follow") == 130
    assert capsys.readouterr().err == (
        "\nthe command was interrupted, but 000012 was created already; drumline delete 000012"
        " stops it\n"
    )


def test_ctrl_c_during_a_resume_prints_if_the_job_restarts(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.holds(a_job("000012", status="CANCELLED"))
    path, text = "/jobs/000012/resume", "000012 restarts on a new slice"
    _interrupt_packing(server, monkeypatch, path, (200, {"job": {}, "text": text}))
    assert drumline("resume", "12") == 130
    assert capsys.readouterr().err == f"\nthe command was interrupted, but {text}\n"


def test_create_as_json(
    server: Any, a_job: Make, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /jobs"] = (201, a_job("000012"))
    assert drumline("create", str(job_file), "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "000012"


def test_a_dry_run_prints_the_plan_and_creates_nothing(
    server: Any, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    server.answers["POST /plan"] = {"lines": ["would request v4-8", "would run: python train.py"]}
    assert drumline("create", str(job_file), "--dry-run") == 0
    assert capsys.readouterr().out == "would request v4-8\nwould run: python train.py\n"
    assert [path for _, path, _ in server.requests] == ["/plan"]
    assert "s3cret" not in json.dumps(server.requests)


def test_an_invalid_job_file_creates_nothing(
    server: Any, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    job_file.write_text(JOB + "chekpoint: /x\nzones2: 1\n")
    assert drumline("create", str(job_file)) == 2
    *problems, last = capsys.readouterr().err.splitlines()
    assert last == "nothing was created"
    assert "chekpoint" in problems[0]
    assert "checkpoint" in problems[0]
    assert server.requests == []


def test_a_secret_that_is_not_set_is_named(
    server: Any,
    job_file: Path,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WANDB_KEY")
    assert drumline("create", str(job_file)) == 2
    message = "secrets: WANDB_KEY not set in this environment; export it and try again\n"
    assert capsys.readouterr().err == message
    assert server.requests == []


def test_errors_of_the_server_are_printed(
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
def test_the_exit_code_of_wait_depends_on_the_ends_of_the_jobs(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, statuses: list[str], code: int
) -> None:
    ids = [f"{n:06}" for n in range(1, len(statuses) + 1)]
    for one, status in zip(ids, statuses, strict=True):
        server.answers[f"GET /jobs/{one}/events"] = events_of(a_job(one, status=status))
    assert drumline("wait", *ids) == code
    lines = [f"{one} {status}" for one, status in zip(ids, statuses, strict=True)]
    assert capsys.readouterr().out.splitlines() == lines


def test_wait_exits_with_124_after_its_timeout(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    server.answers["GET /jobs/000001/events"] = events_of(a_job("000001", status="SUCCEEDED"))
    server.answers["GET /jobs/000002/events"] = events_of(a_job("000002"))
    assert drumline("wait", "1", "2", "--timeout", "0.05") == 124
    captured = capsys.readouterr()
    assert captured.out.splitlines() == ["000001 SUCCEEDED", "000002 RUNNING"]
    assert captured.err == "timed out after 0.05 s; still running: 000002\n"


# resume, cancel, delete, clean


def test_cancel_prints_the_cost_of_the_kept_slice(
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


def test_one_invalid_id_changes_nothing(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    server.holds(a_job())
    assert drumline("cancel", "4", "99") == 2
    assert drumline("delete", "--yes", "4", "x") == 2
    assert all(method == "GET" for method, _, _ in server.requests)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_jobs_are_given_by_name(server: Any, a_job: Make, drumline: Run, capsys: Printed) -> None:
    server.holds(a_job(), a_job("000005"), a_job("000006"))
    server.answers["GET /ids"] = ["000005", "000006"]
    for job in ("000004", "000005", "000006"):
        server.answers[f"POST /jobs/{job}/cancel"] = {"job": {}, "text": f"{job} is being stopped"}
    assert drumline("cancel", "vit b/1", "4", "größer", "5") == 0
    assert server.requests[0][1] == "/ids?name=vit+b%2F1&name=gr%C3%B6%C3%9Fer"
    assert capsys.readouterr().out.splitlines() == [
        "000005 is being stopped",
        "000004 is being stopped",
        "000006 is being stopped",
    ]


@pytest.mark.parametrize(
    "command",
    [
        "show llama",
        "plot llama",
        "follow llama",
        "logs llama",
        "wait 4 llama",
        "resume llama",
        "cancel 4 llama",
        "delete 4 llama --yes",
        "clean 4 llama --yes",
        "exec llama -- true",
        "ssh llama",
        "cp llama:out .",
        "list --before llama",
        "create {file} --from llama",
        "create {file} --from llama --dry-run",
    ],
)
def test_an_ambiguous_name_changes_nothing(
    server: Any, a_job: Make, job_file: Path, drumline: Run, capsys: Printed, command: str
) -> None:
    server.holds(a_job())
    message = "2 jobs are named llama; give one of their ids instead:\n  000004 RUNNING"
    server.answers["GET /ids"] = (404, {"error": message})
    assert drumline(*command.format(file=job_file).split()) == 2
    assert capsys.readouterr().err == message + "\n"
    assert all(method == "GET" for method, _, _ in server.requests)


@pytest.mark.parametrize(
    ("active", "target"), [(1, "000005"), (2, None), (0, None)], ids=["one", "two", "none"]
)
def test_the_emulator_takes_a_name_for_the_only_job_that_has_not_ended(
    server: Any,
    a_job: Make,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
    active: int,
    target: str | None,
) -> None:
    ended = [a_job(f"00000{n}", name="sums", ended=1.0) for n in range(1, 5)]
    server.holds(*ended, *(a_job(f"00000{5 + n}", name="sums") for n in range(active)))
    message = "several jobs are named sums; give one of their ids instead"
    server.answers["GET /ids"] = (404, {"error": message})
    preempted: list[str] = []

    def control(verb: str, *, target: str, **_: Any) -> dict[str, str]:
        assert verb == "preempt"
        preempted.append(target)
        return {"preempted": target}

    monkeypatch.setattr("drumline.cli.emulator._control", control)
    assert drumline("emulator", "preempt", "sums") == (0 if target else 2)
    assert preempted == ([target] if target else [])
    assert target or capsys.readouterr().err == message + "\n"


@pytest.mark.parametrize("target", ["5", "000005", "sums"])
@pytest.mark.parametrize("verb", ["preempt", "break"])
def test_the_emulator_says_that_an_ended_job_holds_no_slice(
    server: Any,
    a_job: Make,
    drumline: Run,
    capsys: Printed,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    verb: str,
) -> None:
    ended = {"name": "sums", "status": "SUCCEEDED", "ended": 1.0, "chips_held": 0}
    server.holds(a_job("000005", **ended))
    server.answers["GET /ids"] = ["000005"]
    monkeypatch.setattr("drumline.cli.emulator._control", None)
    assert drumline("emulator", verb, target) == 2
    assert capsys.readouterr().err == "000005 sums is SUCCEEDED and holds no slice\n"


@pytest.mark.parametrize("target", ["5", "sums"])
def test_the_emulator_preempts_the_slice_that_a_cancelled_job_keeps(
    server: Any, a_job: Make, drumline: Run, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    server.holds(a_job("000005", name="sums", status="CANCELLED", ended=1.0))
    server.answers["GET /ids"] = ["000005"]
    targets: list[str] = []

    def control(_: str, *, target: str, **__: Any) -> dict[str, str]:
        targets.append(target)
        return {"preempted": target}

    monkeypatch.setattr("drumline.cli.emulator._control", control)
    assert drumline("emulator", "preempt", target) == 0
    assert targets == ["000005"]


def test_an_error_of_one_job_does_not_stop_the_others(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    server.holds(a_job(), a_job("000005"))
    server.answers["POST /jobs/000004/clean"] = (409, {"error": "000004 is still stopping"})
    server.answers["POST /jobs/000005/clean"] = {"job": {}, "text": "000005 is gone"}
    assert drumline("clean", "--yes", "4", "5") == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("000005 is gone\n", "000004 is still stopping\n")


def test_resume_reads_secrets_from_the_environment(
    server: Any, a_job: Make, job_file: Path, drumline: Run, capsys: Printed
) -> None:
    del job_file
    server.holds(a_job(status="FAILED", spec={"secrets": ["WANDB_KEY"]}))
    server.answers["POST /jobs/000004/resume"] = {"job": {}, "text": "000004 goes on"}
    assert drumline("resume", "4") == 0
    assert server.requests[-1][2]["secrets"] == {"WANDB_KEY": "s3cret"}
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
def test_all_selects_the_jobs_that_a_verb_applies_to(
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
def test_either_ids_or_all_are_required(
    server: Any, drumline: Run, capsys: Printed, verb: str
) -> None:
    message = f"{verb}: give job ids, or --all\n"
    for words in ((), ("4", "--all")):
        assert drumline(verb, *words) == 2
        assert capsys.readouterr().err == message
    server.holds()
    assert drumline(verb, "--all", *(() if verb == "wait" else ("--yes",))) == 0
    if verb != "wait":
        assert capsys.readouterr().out == f"there is no job to {verb}\n"


def test_wait_for_all_active_jobs_as_json(
    server: Any, a_job: Make, drumline: Run, capsys: Printed
) -> None:
    server.holds(a_job("000001"), a_job("000002", status="FAILED"))
    server.answers["GET /jobs/000001/events"] = events_of(a_job("000001", status="SUCCEEDED"))
    assert drumline("wait", "--all", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"000001": "SUCCEEDED"}


@pytest.mark.parametrize("verb", ["delete", "clean"])
def test_without_a_terminal_yes_is_required(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, verb: str
) -> None:
    server.holds(a_job())
    server.answers[f"POST /jobs/000004/{verb}"] = {"job": {}, "text": "done"}
    assert drumline(verb, "4") == 2
    message = f"{verb} needs a confirmation, and there is no terminal: add --yes\n"
    assert capsys.readouterr().err == message
    assert all(method == "GET" for method, _, _ in server.requests)
    assert drumline(verb, "4", "--yes") == 0
    assert capsys.readouterr().out == "done\n"


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "FAILED", "chips_held": 0},
        {"status": "CANCELLED"},
        {"status": "WAITING", "chips_held": 0, "progress": None},
    ],
)
def test_delete_asks_only_before_it_stops_a_program(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, changes: dict[str, Any]
) -> None:
    server.holds(a_job(**changes), a_job("000005"))
    for one in ("000004", "000005"):
        server.answers[f"POST /jobs/{one}/delete"] = {"job": {}, "text": "done"}
    assert drumline("delete", "4") == 0
    assert capsys.readouterr().out == "done\n"
    assert drumline("delete", "4", "5") == 2
    assert "add --yes" in capsys.readouterr().err


def test_ctrl_c_at_a_question_changes_nothing(
    server: Any, a_job: Make, drumline: Run, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.holds(a_job())

    def press_ctrl_c(*_: Any, **__: Any) -> bool:
        raise Abort

    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("typer.confirm", press_ctrl_c)
    assert drumline("delete", "4") == 1
    assert capsys.readouterr().out == "\nnothing was changed\n"
    assert all(method == "GET" for method, _, _ in server.requests)


@pytest.mark.parametrize(("typed", "done"), [("y", True), ("n", False), ("", False)])
def test_on_a_terminal_delete_asks_for_confirmation(
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
    assert "this stops it and releases 64 chips in us-central2-b. Continue? [y/N]" in out
    assert ("64 chips are released" in out) == done
    assert ("nothing was changed" in out) != done


@pytest.mark.parametrize(
    ("verb", "changes", "message"),
    [
        ("cancel", {}, "would stop the program of 000004 llama-1b (RUNNING at step 18,400) and "
         "keep 64 chips in us-central2-b, about $103 an hour"),
        ("cancel", {"status": "FAILED"}, "would change nothing: 000004 llama-1b is FAILED"),
        ("cancel", {"chips_held": 0, "status": "WAITING", "progress": None},
         "would stop 000004 llama-1b (WAITING); it holds no slice"),
        ("delete", {}, "would stop 000004 llama-1b (RUNNING at step 18,400) and release 64 chips "
         "in us-central2-b"),
        ("delete", {"status": "FAILED", "chips_held": 0, "progress": None},
         "would change nothing: 000004 llama-1b (FAILED) holds no slice"),
        ("clean", {"status": "CANCELLED"}, "would release 64 chips in us-central2-b and remove "
         "the logs and the record of 000004 llama-1b"),
        ("resume", {"status": "CANCELLED"}, "would restart 000004 llama-1b (CANCELLED at step "
         "18,400) on its 64 chips in us-central2-b"),
        ("resume", {"status": "FAILED", "chips_held": 0, "progress": None},
         "would restart 000004 llama-1b (FAILED) on a new v4-128"),
        ("resume", {}, "would change nothing: 000004 llama-1b is RUNNING"),
    ],
)  # fmt: skip
def test_a_dry_run_changes_nothing(
    server: Any,
    a_job: Make,
    drumline: Run,
    capsys: Printed,
    verb: str,
    changes: dict[str, Any],
    message: str,
) -> None:
    server.holds(a_job(**changes))
    assert drumline(verb, "4", "--dry-run") == 0
    assert capsys.readouterr().out == message + "\n"
    assert all(method == "GET" for method, _, _ in server.requests)
