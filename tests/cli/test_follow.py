import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.connect import runnable
from drumline.cli.follow import EventFormatter, Screen, follow, progress_line
from drumline.cli.rendering.text import display_width, sanitize
from drumline.jobs.client import Client

Run = Callable[..., int]
Make = Callable[..., dict[str, Any]]

JOB = "accelerator: v4-16\nzones: [local-a, local-b]\nrun: python count.py\n"


def event(number: int, time: float, kind: str, text: str = "") -> dict[str, Any]:
    return {"id": number, "time": 1_700_000_000.0 + time, "kind": kind, "text": text}


FIRST = [
    event(1, 0.0, "created", "digits"),
    event(2, 0.1, "asked", "v4-16 in local-a"),
    event(3, 1.3, "slice", "2 hosts, 8 chips in local-a"),
    event(4, 1.6, "code", "14 files, 38 kB → 2 hosts"),
    event(5, 1.7, "run", "python count.py"),
]
TAKEN = [
    event(6, 20.0, "preempted", "slice preempted at step 151 (checkpoint: step 150)"),
    event(7, 20.1, "asked", "v4-16 in local-b"),
    event(8, 21.1, "slice", "2 hosts, 8 chips in local-b"),
    event(9, 21.2, "code", "14 files, 38 kB → 2 hosts"),
    event(10, 21.3, "run", "python count.py"),
]


@pytest.fixture
def a_life(server: Any, a_job: Make, tmp_path: Path) -> Callable[..., Path]:
    """Simulate a job by a list of (events, changes to the job). Return its file."""

    def make(*turns: tuple[list[dict[str, Any]], dict[str, Any]], **final: Any) -> Path:
        base = a_job(
            "000001", name="digits", accelerator="v4-16", preemptions=0, progress=None,
            cost=None, cost_per_hour=None, spec={"zones": ["local-a", "local-b"], "secrets": []},
        )  # fmt: skip
        left = list(turns)
        server.answers["POST /jobs"] = (201, base | {"status": "QUEUED"})
        server.answers["GET /jobs/000001"] = base | turns[-1][1] | final

        def events(query: str, _: Any) -> Any:
            del query
            happened, changes = left.pop(0)
            return {"events": happened, "job": base | changes}

        server.answers["GET /jobs/000001/events"] = events
        file = tmp_path / "job.yaml"
        file.write_text(JOB)
        return file

    return make


def test_follow_prints_the_events_of_a_preempted_job(
    a_life: Callable[..., Path], drumline: Run, capsys: pytest.CaptureFixture[str], server: Any
) -> None:
    result = "test accuracy 97.1 %\nparameters identical to an undisturbed run: yes"
    end = {"status": "SUCCEEDED", "ended": 1_700_000_048.0, "preemptions": 1, "steps_again": 1,
           "progress": {"step": 300, "total": 300, "loss": 0.093, "result": result}}  # fmt: skip
    file = a_life(
        (FIRST[:2], {"status": "WAITING"}),
        (FIRST[2:], {"progress": {"step": 140, "total": 300, "loss": 0.4123,
                                  "rate": 9800, "item": "images", "mfu": None}}),
        (TAKEN, {"status": "RUNNING", "progress": {"step": 152, "total": 300}}),
        ([event(11, 48.0, "succeeded")], end),
    )  # fmt: skip
    assert drumline("create", str(file), "--follow") == 0
    assert capsys.readouterr().out.splitlines() == [
        "● 000001 digits · v4-16 · local",
        "  ✓ slice   2 hosts, 8 chips in local-a                       1.2 s",
        "  ✓ code    14 files, 38 kB → 2 hosts                         0.3 s",
        "  ✓ run     python count.py",
        "  ▸ step 140/300  loss 0.4123  9.8k img/s  MFU –",
        "  ! slice preempted at step 151 (checkpoint: step 150)",
        "  ✓ slice   2 hosts, 8 chips in local-b                       1.0 s",
        "  ▸ step 300/300  loss 0.093",
        "✓ 000001 succeeded in 48 s · test accuracy 97.1 % · 1 preemption, 1 step repeated",
        "  parameters identical to an undisturbed run: yes",
        "  next: drumline show 000001 · drumline plot 000001 · drumline logs 000001",
    ]
    afters = [
        path.split("after=")[1].split("&")[0] for _, path, _ in server.requests if "after" in path
    ]
    assert afters == ["0", "2", "5", "10"]


def test_a_failure_ends_with_its_cause_and_exit_code_1(
    a_life: Callable[..., Path], drumline: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    cause = {"host": 1, "hosts": 4, "ahead_seconds": 0.8, "error": "ValueError: batch 250",
             "tail": ["before", "ValueError: batch 250"], "kind": "program"}  # fmt: skip
    failed = [event(6, 9.0, "failed", "program failed on host 1"), event(7, 9.0, "failed", "all 3")]
    file = a_life(
        (FIRST, {}), (failed, {"status": "FAILED", "failures": 3, "chips_held": 0}), cause=cause
    )
    assert drumline("create", str(file), "--follow") == 1
    assert capsys.readouterr().out.splitlines()[4:] == [
        "  ✗ program failed on host 1",
        "✗ 000001 failed after 3 failures of the program",
        "  host 1 of 4, first to fail, 0.8 s before the others:",
        "  ValueError: batch 250",
        "  its last lines:",
        "    before",
        "  next: fix the job, then: drumline resume 000001        "
        "its logs: drumline logs 000001 --host 1",
    ]


def test_a_cancelled_job_exits_with_1(
    a_life: Callable[..., Path], drumline: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    file = a_life((FIRST, {"status": "CANCELLED", "ended": 1_700_000_020.0}))
    assert drumline("create", str(file), "--follow") == 1
    assert "! 000001 was cancelled after 20 s" in capsys.readouterr().out


def test_with_json_events_go_to_stderr(
    a_life: Callable[..., Path], drumline: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    file = a_life((FIRST, {"status": "SUCCEEDED", "ended": 1_700_000_020.0}))
    assert drumline("create", str(file), "--follow", "--json") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["status"] == "SUCCEEDED"
    assert "✓ slice" in captured.err


def test_ctrl_c_does_not_stop_the_job(
    a_life: Callable[..., Path],
    drumline: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    server: Any,
) -> None:
    from drumline.jobs.client import Client

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    file = a_life((FIRST, {}))
    monkeypatch.setattr(Client, "events", interrupted)
    assert drumline("create", str(file), "--follow") == 130
    output = capsys.readouterr().err.strip()
    assert output == "000001 keeps running; follow it with: drumline follow 000001"
    assert [method for method, _, _ in server.requests] == ["POST"]


def test_a_repeated_wait_is_printed_once() -> None:
    formatter = EventFormatter()
    output = [formatter.lines(event(n, n, "waiting", "no capacity in a")) for n in range(3)]
    assert output == [["  · no capacity in a"], [], []]
    assert formatter.lines(event(4, 4, "waiting", "no capacity in b")) == ["  · no capacity in b"]


def test_a_resume_is_a_sentence() -> None:
    line = "  · resumed on the slice kept in local-a"
    resumed = event(1, 0, "resumed", "on the slice kept in local-a")
    assert EventFormatter().lines(resumed) == [line]


def test_events_are_sanitized() -> None:
    assert EventFormatter().lines(event(1, 0, "note", "\x1b[2Jgone\n")) == ["  · gone "]


def test_a_terminal_keeps_the_progress_line_at_an_interruption() -> None:
    stream = io.StringIO()
    screen = Screen(stream, columns=30)
    screen.progress("  ▸ step 1/3")
    screen.progress("  ▸ step 2/3")
    screen.progress("  ▸ step 2/3")
    screen.write_line("  · note")
    screen.progress("  ▸ step 3/3 " + "x" * 60)
    screen.write_line("  ! slice preempted", keep_progress=True)
    wipe = "\r\x1b[K"
    cut = "  ▸ step 3/3 " + "x" * 15 + "…"
    assert stream.getvalue() == (
        f"{wipe}  ▸ step 1/3{wipe}  ▸ step 2/3{wipe}  · note\n{wipe}{cut}\n  ! slice preempted\n"
    )


def test_a_pipe_gets_occasional_progress_without_escapes() -> None:
    stream, now = io.StringIO(), 0.0
    screen = Screen(stream, columns=None, clock=lambda: now)
    for step in range(40):
        now = float(step)
        screen.progress(f"  ▸ step {step}", last=step == 39)
    assert stream.getvalue() == "".join(f"  ▸ step {step}\n" for step in (0, 15, 30, 39))


@pytest.mark.parametrize(
    ("progress", "line"),
    [
        ({"step": 11, "total": 22}, "  ▸ step    11/22 ━━━━━━━━━━━╸━━━━━━━━━━"),
        ({"step": 22, "total": 22}, "  ▸ step    22/22 ━━━━━━━━━━━━━━━━━━━━━━"),
        ({"step": 5}, "  ▸ step        5"),
        ({"step": 5, "total": 1000, "mfu": None}, f"  ▸ step     5/1,000 ╸{21 * '━'}  MFU –"),
        ({"step": 1000, "total": 1000, "mfu": None}, f"  ▸ step 1,000/1,000 {22 * '━'}  MFU –"),
        ({"step": 5, "total": 0, "loss": float("nan")}, "  ▸ step      5/0  loss nan"),
        ({"step": 5, "loss": "nan"}, "  ▸ step        5  loss nan"),
        ({"step": 5, "rate": 1.25e6, "item": "tokens"}, "  ▸ step        5  1.25M tok/s"),
        ({"step": 5, "rate": 2}, "  ▸ step        5  2 steps/s"),
        ({"step": 5, "tokens_per_second": 512}, "  ▸ step        5  512 tokens/s"),
        ({"step": 5, "mfu": 0.412}, "  ▸ step        5  MFU 41.2 %"),
        ({"step": 5, "mfu": "high", "rate": "fast"}, "  ▸ step        5  MFU –"),
        ({"step": float("nan")}, ""),
        ({"step": "five"}, ""),
        ({}, ""),
        (None, ""),
    ],
)
def test_the_progress_line_accepts_any_metrics(
    a_job: Make, progress: dict[str, Any] | None, line: str
) -> None:
    assert progress_line(a_job(progress=progress), columns=80) == line


def test_events_fit_a_narrow_terminal(a_life: Callable[..., Path], a_job: Make) -> None:
    result = "test accuracy 97.1 %\nparameters identical to an undisturbed run: yes"
    end = {"status": "SUCCEEDED", "ended": 1_700_000_048.0, "preemptions": 1, "steps_again": 1,
           "progress": {"step": 300, "total": 300, "loss": 0.093, "result": result}}  # fmt: skip
    full = {"step": 140, "total": 300, "loss": 0.4123, "rate": 9800, "item": "images", "mfu": None}
    a_life((FIRST, {"progress": full}), (TAKEN, {}), ([event(11, 48.0, "succeeded")], end))
    written = io.StringIO()
    follow(Client(autostart=False), a_job("000001"), Screen(written, columns=46))
    lines = [sanitize(line) for line in re.split(r"[\n\r]", written.getvalue())]
    assert max(map(display_width, lines)) <= 46
    output = " ".join(" ".join(lines).split())
    assert "slice preempted at step 151 (checkpoint: step 150)" in output
    assert "drumline show 000001 · drumline plot 000001 · drumline logs 000001" in output
    assert "  ✓ slice   2 hosts, 8 chips in local-a  1.2 s" in lines
    assert "  ▸ step  140/300  loss 0.4123  9.8k img/s" in lines


def test_the_bar_fits_the_terminal(a_job: Make) -> None:
    job = a_job(progress={"step": 140, "total": 300, "loss": 0.4123, "rate": 9.0, "mfu": 0.4})
    drawn = {columns: progress_line(job, columns) for columns in range(20, 100)}
    assert all(display_width(line) < columns for columns, line in drawn.items())
    assert [drawn[columns].count("━") + drawn[columns].count("╸") for columns in (99, 66)] == [
        22,
        11,
    ]


def test_follow_prints_past_events(
    a_life: Callable[..., Path], drumline: Run, capsys: pytest.CaptureFixture[str], server: Any
) -> None:
    a_life((FIRST, {}), ([event(6, 9.0, "succeeded")], {"status": "SUCCEEDED", "ended": 1.0}))
    assert drumline("follow", "1") == 0
    output = capsys.readouterr().out
    assert "● 000001 digits" in output
    assert "✓ 000001 succeeded" in output
    assert {method for method, _, _ in server.requests} == {"GET"}


@pytest.mark.parametrize("on_path", [True, False])
def test_the_next_commands_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_path: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", [".venv/bin/drumline", "create"])
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/drumline" if on_path else None)
    shown = runnable("next: drumline show 000001 · drumline logs 000001")
    name = "drumline" if on_path else ".venv/bin/drumline"
    assert shown == f"next: {name} show 000001 · {name} logs 000001"
    monkeypatch.setattr("sys.argv", ["/opt/lab/bin/drumline", "create"])
    shown = runnable("drumline show 1")
    assert shown == ("drumline show 1" if on_path else "/opt/lab/bin/drumline show 1")


def test_only_the_newest_events_are_printed(
    a_life: Callable[..., Path], drumline: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [event(n, n, "preempted", f"slice preempted at step {n}") for n in range(1, 1001)]
    a_life((many, {}), ([event(1001, 9.0, "succeeded")], {"status": "SUCCEEDED", "ended": 1.0}))
    assert drumline("follow", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "  … 960 earlier lines: show 000001 --json"
    assert lines[2] == "  ! slice preempted at step 961"
    assert "  ! slice preempted at step 1000" in lines
