import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.rendering.show import render_job

Run = Callable[..., int]
Make = Callable[..., dict[str, Any]]

NOON = 1_699_963_200.0  # 12:00 UTC on 14 Nov 2023


@pytest.fixture
def failed(a_job: Make, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Three failures of the program, with a wait for capacity before the third."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    def attempt(number: int, zone: str, begin: float, end: float, detail: str) -> dict[str, Any]:
        times = {"started": NOON + 60 * begin, "ended": NOON + 60 * end, "running": None}
        message = {
            "outcome": "program failed",
            "detail": detail,
            "accelerator": "v4-8",
            "hosts": [],
        }
        return {"number": number, "zone": zone, **times, **message}

    return a_job(
        "000007",
        name="moe-small",
        status="FAILED",
        reason="3 failures of the program",
        failures=3,
        preemptions=0,
        chips_held=0,
        cost=9.12,
        cost_lost=9.12,
        progress=None,
        cost_per_hour=None,
        ended=NOON + 60 * 153,
        cause={
            "host": 1,
            "hosts": 4,
            "ahead_seconds": 0.8,
            "error": "train.py:214  ValueError: batch 250 does not divide by 8 devices",
            "tail": ["step 10", "Traceback …", "ValueError: \x1b[31mbatch 250"],
            "kind": "program",
        },
        attempts=[
            attempt(1, "us-central2-b", 122, 129, "on host 1"),
            attempt(2, "us-central2-b", 129, 131, "on host 1 (same error)"),
            attempt(3, "us-east1-d", 151, 153, "program failed on host 1 (same error)"),
        ],
        events=[
            {"id": 1, "time": NOON + 60 * 132, "kind": "waiting",
             "text": "no capacity in us-central2-b"},
        ],
    )  # fmt: skip


def test_show_prints_cause_attempts_and_next_steps(failed: dict[str, Any]) -> None:
    assert render_job(failed, now=NOON + 60 * 200) == [
        "000007 moe-small · FAILED after 3 failures of the program",
        "cause    host 1 of 4, first to fail, 0.8 s before the others:",
        "         train.py:214  ValueError: batch 250 does not divide by 8 devices",
        "         its last lines:",
        "           step 10",
        "           Traceback …",
        "           ValueError: batch 250",
        "attempts 1  us-central2-b  14:02 → 14:09  program failed on host 1",
        "         2  us-central2-b  14:09 → 14:11  program failed on host 1 (same error)",
        "         3  us-east1-d     14:31 → 14:33  program failed on host 1 (same error)",
        "         between 2 and 3: no capacity in us-central2-b, 20 min",
        "cost     $9.12, of it $9.12 lost",
        "slice    released",
        "next     fix the job, then: drumline resume 000007        "
        "its logs: drumline logs 000007 --host 1 --attempt 3",
    ]


def test_show_prints_how_long_a_failed_job_keeps_its_slice(failed: dict[str, Any]) -> None:
    kept = {"name": "dl-ab-000007-1", "zone": "us-east1-d", "state": "ready", "kept_for": 250.0,
            "held_since": NOON + 60 * 150, "per_hour": 3.1}  # fmt: skip
    lines = render_job(failed | {"slice": kept, "chips_held": 4}, now=NOON + 60 * 153)
    assert lines[-2] == (
        "slice    dl-ab-000007-1 in us-east1-d, ready, held for 3 min,"
        " kept until 14:37 for a resume, about $3.10 an hour"
    )
    assert lines[-1].endswith("· drumline delete 000007 releases its slice")


def test_show_prints_the_message_of_a_failure_once(failed: dict[str, Any]) -> None:
    error = "train.py:7  ValueError: no"
    failed["cause"] |= {"error": error, "tail": ["hello", "ValueError: no"], "ahead_seconds": 0.0}
    failed["reason"] = f"3 failures, the last of the program on host 1 of 4: {error}"
    for attempt in failed["attempts"]:
        attempt["detail"] = f"program failed on host 1 of 4: {error}"
    failed["attempts"][1]["detail"] = "program failed on host 0 of 4: killed by SIGKILL"
    lines = render_job(failed, now=NOON + 60 * 200)
    text = "\n".join(lines)
    assert text.count("ValueError: no") == 1
    assert lines[1:5] == [
        "cause    host 1 of 4, first to fail:",
        f"         {error}",
        "         its last lines:",
        "           hello",
    ]
    assert [line.partition("  ")[2][-60:].split("  ")[-1] for line in lines[5:8]] == [
        "program failed on host 1 of 4",
        "program failed on host 0 of 4: killed by SIGKILL",
        "program failed on host 1 of 4 (same error)",
    ]


def test_the_last_lines_leave_out_what_libraries_print_in_every_program(
    failed: dict[str, Any],
) -> None:
    error = "train.py:7  ValueError: no"
    gloo = "[Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected peer ranks is"
    removed = "For simplicity, JAX has removed its internal frames from the traceback of the"
    tail = [*12 * [f"{gloo} : 1"], "resumed from 180", "ValueError: no", "-" * 20, removed]
    failed["cause"] |= {"error": error, "tail": tail}
    lines = render_job(failed, now=NOON + 60 * 200)
    assert lines[2:5] == [
        f"         {error}",
        "         its last lines:",
        "           resumed from 180",
    ]
    assert lines[5].startswith("attempts")


def test_the_headline_of_a_restarting_job_leaves_the_error_to_the_cause(a_job: Make) -> None:
    cause = {"host": 0, "hosts": 1, "error": "ValueError: no", "tail": [], "kind": "program failed"}
    reason = "program failed on host 0 of 1: ValueError: no; starting again"
    job = a_job(status="RECOVERING", cause=cause, reason=reason, preemptions=0, failures=1)
    lines = render_job(job, now=NOON)
    assert "program failed on host 0 of 1; starting again · 1 failure" in lines[0]
    assert "\n".join(lines).count("ValueError: no") == 1


def test_show_prints_hosts_and_slice_of_a_running_job(a_job: Make) -> None:
    hosts = [{"index": n, "phase": "running", "error": "", "detail": ""} for n in range(16)]
    hosts[3] |= {"phase": "connecting", "detail": "connection refused"}
    job = a_job(
        attempts=[{"number": 1, "zone": "us-central2-b", "started": NOON, "ended": None,
                   "outcome": None, "detail": None, "hosts": hosts}],
        slice={"name": "dl-ab-000004-1", "zone": "us-central2-b", "state": "ready",
               "held_since": NOON, "per_hour": 103.04},
        events=[{"id": n, "time": NOON + n, "kind": "run", "text": f"t{n}"} for n in range(9)],
    )  # fmt: skip
    text = "\n".join(render_job(job, now=NOON + 7800))
    assert "RUNNING · step 18,400/50,000 · 41.2 % MFU · 3 preemptions" in text
    assert "hosts    15 of 16 running\n         host 3 connecting: connection refused" in text
    assert "dl-ab-000004-1 in us-central2-b, ready, held for 2 h 10 min, about $103 an hour" in text
    assert "in progress" in text
    assert "t8" in text
    assert "t5" not in text
    assert "cost     $412 so far, $103 an hour now" in text
    assert "drumline logs 000004 --follow" in text


def test_show_prints_slices_held_back_and_their_price(a_job: Make) -> None:
    parked = [
        {"name": "dl-ab-000004-1", "zone": "us-central2-b", "per_hour": 5.15},
        {"name": "dl-ab-000004-2", "zone": "local-a", "per_hour": None},
    ]
    text = "\n".join(render_job(a_job(parked=parked), now=NOON))
    first = "dl-ab-000004-1 in us-central2-b, has a bad host, held back until another slice runs"
    assert f"held     {first}, about $5.15 an hour\n" in text
    assert "dl-ab-000004-2 in local-a, has a bad host, held back until another slice runs\n" in text
    assert "held back" not in "\n".join(render_job(a_job(), now=NOON))


def test_show_prints_every_request_of_a_waiting_job(a_job: Make) -> None:
    request = {"accelerator": "v4-16", "refusal": "", "asked": NOON - 120.0}
    requests = [
        request | {"name": "r-1", "zone": "us-central2-b", "role": "requested"},
        request | {"name": "r-2", "zone": "local-a", "role": "starting"},
        request | {"name": "r-3", "zone": "local-b", "role": "requested", "refusal": "no login"},
    ]
    job = a_job(status="WAITING", requests=requests, slice={"name": "r-2", "zone": "local-a"})
    text = "\n".join(render_job(job, now=NOON))
    assert "slice    v4-16 in us-central2-b, requested 2 min ago: no capacity yet\n" in text
    assert "v4-16 in local-a, requested 2 min ago: granted, its hosts boot\n" in text
    assert "v4-16 in local-b, requested 2 min ago: no login\n" in text


def test_show_prints_the_cost_of_slices_that_were_granted_too_late(a_job: Make) -> None:
    text = "\n".join(render_job(a_job(cost=4.0, cost_lost=1.0, cost_unused=0.25), now=NOON))
    assert "cost     $4.00, of it $1.00 lost so far, $103 an hour now; $0.25 for slices" in text


def test_show_prints_progress_and_metrics(a_job: Make) -> None:
    progress = {"step": 18400, "total": 50000, "loss": 2.3125, "rate": 9800.0, "item": "images",
                "mfu": 0.412, "goodput": 0.93, "checkpoint": 18000}  # fmt: skip
    course = {"step": 18400, "stepped_at": NOON, "saved_at": NOON - 125}
    attempt = {"number": 1, "zone": "us-central2-b", "started": NOON - 9000, "ended": None,
               "outcome": None, "detail": None, "hosts": [], "course": course}  # fmt: skip
    lines = render_job(a_job(progress=progress, attempts=[attempt]), now=NOON)
    assert lines[1:3] == [
        "progress step 18,400/50,000 · loss 2.312 · 9.8k images/s · MFU 41.2 % · goodput 93 %",
        "         last checkpoint: step 18,000, 2 min 5 s ago",
    ]


def test_show_prints_result_and_duration(a_job: Make) -> None:
    progress = {"step": 300, "total": 300, "result": "test accuracy 97.1 %\n\x1b[2Jidentical: yes"}
    ended = {"status": "SUCCEEDED", "ended": 1_700_000_048.0, "preemptions": 1, "steps_again": 1}
    lines = render_job(a_job(progress=progress, **ended), now=NOON)
    assert lines[:4] == [
        "000004 llama-1b · SUCCEEDED in 48 s · 1 preemption · 1 step repeated",
        "progress step 300/300",
        "result   test accuracy 97.1 %",
        "         identical: yes",
    ]


def test_an_error_that_earlier_attempts_had_is_printed_once(failed: dict[str, Any]) -> None:
    error = "train.py:27  ValueError: no arrays"
    failed |= {"status": "SUCCEEDED", "ended": NOON, "cause": None}
    for number, attempt in enumerate(failed["attempts"]):
        attempt |= {"detail": f"on host {number} of 4: {error}"}
    failed["attempts"].insert(1, failed["attempts"][0] | {"outcome": "preempted", "detail": "x"})
    failed["attempts"].append(failed["attempts"][1])
    lines = render_job(failed, now=NOON + 60 * 200)
    texts = [line.partition(" → 14:")[2][4:] for line in lines if " → 14:" in line]
    assert texts == [
        f"program failed on host 0 of 4: {error}",
        "preempted: x",
        "program failed on host 1 of 4 (same error)",
        "program failed on host 2 of 4 (same error)",
        "preempted: x",
    ]


def test_show_prints_since_when_a_program_was_stuck(failed: dict[str, Any]) -> None:
    course = {"step": 151, "stepped_at": NOON + 60 * 122}
    failed["attempts"][0] |= {"outcome": "stuck", "detail": "stuck: no step", "course": course}
    failed["attempts"][2] |= {"outcome": "stuck", "detail": "stuck: no step", "course": None}
    text = "\n".join(render_job(failed, now=NOON + 60 * 200))
    assert "14:02 → 14:09  no step since 14:02 (step 151): stuck, restarted" in text
    assert "14:31 → 14:33  no step since its start: stuck, ended" in text
    assert "FAILED after 3 failures of the program" in text


@pytest.mark.parametrize(
    ("lost", "message"),
    [(3.5, "$9.12, of it $3.50 lost"), (0.0, "$9.12"), (None, "$9.12, an unknown part of it lost")],
)
def test_lost_cost_is_printed_if_known(
    failed: dict[str, Any], lost: float | None, message: str
) -> None:
    failed["cost_lost"] = lost
    assert f"cost     {message}" in render_job(failed, now=NOON)


def test_a_job_with_many_attempts_shows_the_first_and_the_last(failed: dict[str, Any]) -> None:
    one = failed["attempts"][0]
    failed["attempts"] = [one | {"number": n} for n in range(1, 101)]
    lines = [line[9:] for line in render_job(failed, now=NOON) if "program failed on" in line]
    assert [int(line.split()[0]) for line in lines] == [1, 2, 3, *range(92, 101)]
    assert any("88 attempts more" in line for line in render_job(failed, now=NOON))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"status": "SUCCEEDED", "ended": 1_700_000_048.0}, "SUCCEEDED in 48 s · 3 preemptions"),
        ({"status": "FAILED", "reason": "11 bad hosts"}, "FAILED: 11 bad hosts"),
        ({"status": "CANCELLED"}, "drumline delete 000004 releases its slice"),
        ({"status": "WAITING", "reason": "no capacity", "chips_held": 0}, "stops waiting"),
        ({"status": "QUEUED", "progress": None, "cost": None}, "slice    none yet"),
        ({"cause": {"host": 0, "hosts": 1, "error": "boom", "tail": ["boom"]}}, "host 0:\n"),
        ({"cause": {"host": None, "hosts": None, "error": "boom"}}, "cause    boom"),
    ],
)
def test_each_status_has_its_text(a_job: Make, changes: dict[str, Any], message: str) -> None:
    assert message in "\n".join(render_job(a_job(**changes), now=1_700_000_100.0))


def test_show_takes_a_short_id_and_prints_json(
    server: Any, a_job: Make, drumline: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    server.holds(a_job())
    assert drumline("show", "4", "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "000004"
    assert drumline("show", "000004") == 0
    assert capsys.readouterr().out.startswith("000004 llama-1b · RUNNING")


def test_the_next_commands_of_show_and_list_can_be_copied(
    server: Any,
    a_job: Make,
    drumline: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [".venv/bin/drumline"])
    monkeypatch.setattr("shutil.which", lambda _: None)
    server.holds(a_job(name="drumline run"))
    assert drumline("show", "4") == 0
    out = capsys.readouterr().out
    assert "next     .venv/bin/drumline logs 000004 --follow · .venv/bin/drumline cancel" in out
    assert "000004 drumline run" in out
    server.answers["GET /jobs"] = []
    assert drumline("list") == 0
    assert "create one: .venv/bin/drumline create job.yaml" in capsys.readouterr().out


def test_an_unknown_job_is_one_message(
    server: Any, drumline: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answers["GET /jobs/000099"] = (404, {"error": "there is no job 000099"})
    assert drumline("show", "99") == 2
    assert capsys.readouterr().err == "there is no job 000099\n"
    assert drumline("show", "0") == 2
    assert capsys.readouterr().err == "'0' is not a job id; drumline list shows them\n"


def test_the_cost_of_emulated_slices_is_not_the_cost(a_job: Make) -> None:
    would_cost = {"would_cost": 1.2, "would_cost_lost": 0.3, "would_cost_zones": ["us-central2-b"]}
    job = a_job(cost=None, cost_per_hour=None, **would_cost, would_cost_per_hour=3.686)
    assert (
        "cost     would be $1.20, of it $0.30 lost so far, $3.69 an hour now, on Google at prices"
        " of us-central2-b"
    ) in render_job(job, now=NOON)
    held = job | {"slice": {"name": "dl-1", "zone": "local-a", "per_hour": None}}
    expected = "slice    dl-1 in local-a, would be about $3.69 an hour on Google"
    assert expected in render_job(held, now=NOON)


@pytest.mark.parametrize(
    ("outcomes", "message"),
    [
        (["set-up failed"], "FAILED after 1 failure of the set-up"),
        (["program failed", "set-up failed"], "FAILED after 2 failures, the last of the set-up"),
        (["preempted", "program failed"], "FAILED after 1 failure of the program"),
    ],
)
def test_failures_name_their_stage(a_job: Make, outcomes: list[str], message: str) -> None:
    attempts = [{"number": n, "outcome": one} for n, one in enumerate(outcomes, 1)]
    failures = sum("failed" in one for one in outcomes)
    job = a_job(status="FAILED", attempts=attempts, failures=failures)
    assert message in render_job(job, now=NOON)[0]
