import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from drumline.cli.rendering.text import display_width
from drumline.cli.rendering.views import render_list, summary_line
from drumline.jobs.server.views import unreadable
from drumline.jobs.store.records import UnreadableJob

Run = Callable[..., int]
Make = Callable[..., dict[str, Any]]


@pytest.fixture
def afternoon(a_job: Make) -> list[dict[str, Any]]:
    """A running, a waiting and a recovering job."""
    waiting = "3rd zone of 4 · no capacity in us-central2-b for 2 h 10 min"
    nowhere = {"zone": None, "host0_ip": None, "progress": None, "chips_held": 0}
    return [
        a_job(),
        a_job("000005", name="llama-1b-lr3", status="WAITING", reason=waiting, preemptions=0,
              cost_per_hour=None, **nowhere),
        a_job("000006", name="vit-b", accelerator="v6e-16", status="RECOVERING", preemptions=0,
              reason="host 2 silent, slice being replaced", chips_held=16, cost_per_hour=108.9,
              progress={"step": 90200, "total": 90400}),
    ]  # fmt: skip


def test_list_prints_zone_progress_and_note(
    server: Any,
    afternoon: list[dict[str, Any]],
    drumline: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.holds(*afternoon)
    assert drumline("list") == 0
    heading, running, waiting, recovering, summary = capsys.readouterr().out.splitlines()
    assert heading.split("  ")[0] == "JOB ID"
    for column in ("USER", "NAME", "ACCELERATOR", "ZONE", "HOST0 IP", "STATUS", "PROGRESS", "NOTE"):
        assert column in heading
    assert running.endswith("18,400/50,000  41.2 % MFU · 3 preemptions")
    assert "35.186.0.98" in running
    assert waiting.split()[4:8] == ["–", "–", "WAITING", "–"]
    assert waiting.endswith("no capacity in us-central2-b for 2 h 10 min")
    assert recovering.endswith("90,200/90,400  host 2 silent, slice being replaced")
    assert summary == "2 slices held, 80 chips, about $212 an hour · 1 waiting"


def test_costs_of_emulated_slices_are_kept_apart(a_job: Make) -> None:
    emulated = a_job("000005", chips_held=4, cost_per_hour=None, would_cost_per_hour=3.686)
    would_cost = "would be about $3.69 an hour on Google"
    assert summary_line([emulated]) == f"1 slice held, 4 chips, {would_cost}"
    assert summary_line([a_job(), emulated]) == (
        f"2 slices held, 68 chips, about $103 an hour, emulated ones {would_cost}"
    )


def test_list_as_json_has_the_documented_keys(
    server: Any,
    afternoon: list[dict[str, Any]],
    drumline: Run,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server.holds(*afternoon)
    assert drumline("list", "--json", "--all") == 0
    jobs = json.loads(capsys.readouterr().out)
    keys = {"id", "user", "name", "accelerator", "zone", "host0_ip", "status", "reason"}
    assert all(keys <= set(job) for job in jobs)
    assert server.requests == [("GET", "/jobs?all=1", None)]


def test_list_passes_on_its_filters(server: Any, drumline: Run) -> None:
    server.holds()
    words = ["--status", "running,Failed", "--name", "llama-*", "--user", "lab", "--limit", "5"]
    assert drumline("list", *words, "--before", "12") == 0
    [(_, path, _)] = server.requests
    assert path == "/jobs?name=llama-%2A&user=lab&limit=5&before=000012&status=RUNNING%2CFAILED"


def test_an_unreadable_job_is_listed(a_job: Make) -> None:
    aside = UnreadableJob("000007", "lab", "bad", "choices: field required")
    line = render_list([a_job(), unreadable(aside)])[2]
    assert line.split()[:3] == ["000007", "lab", "bad"]
    assert "UNREADABLE" in line
    assert line.endswith("its row cannot be read: choices: field required")


def test_an_empty_list_shows_how_to_create_a_job(
    server: Any, drumline: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    server.holds()
    assert drumline("list") == 0
    assert "drumline create job.yaml" in capsys.readouterr().out


def test_names_are_sanitized(
    server: Any, a_job: Make, drumline: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    server.holds(a_job(name="\x1b[2Jevil\n000009", reason="\x07bell", user="\x1b]0;x\x07me"))
    assert drumline("list") == 0
    out = capsys.readouterr().out
    assert all(one.isprintable() for one in out.replace("\n", ""))
    assert len(out.splitlines()) == 3


def test_emulated_slices_have_no_price(a_job: Make) -> None:
    assert render_list([a_job(cost_per_hour=None)])[-1] == "1 slice held, 64 chips"


def test_long_names_are_truncated_on_a_terminal_only(a_job: Make) -> None:
    long = a_job(name="x" * 80, reason="y" * 80)
    assert "x" * 80 in render_list([long])[1]
    # 150 columns have space for the notes; 110 are too few for the other columns.
    assert max(map(display_width, render_list([long], columns=150)[:2])) <= 150
    assert "x" * 11 + "…" in render_list([long], columns=110)[1]


@pytest.mark.parametrize("columns", [40, 60, 80, 100, 120])
def test_a_list_fits_its_terminal(afternoon: list[dict[str, Any]], columns: int) -> None:
    lines = render_list(afternoon, columns=columns)
    assert max(map(display_width, lines)) <= columns
    assert lines[0].startswith("JOB ID")
    assert "STATUS" in lines[0]


def test_a_list_of_80_columns_has_status_and_note(
    afternoon: list[dict[str, Any]],
) -> None:
    heading, running, waiting, *_ = render_list(afternoon, columns=80)
    assert heading.split() == ["JOB", "ID", "NAME", "STATUS", "PROGRESS", "NOTE"]
    assert "18,400/50,000  41.2 % MFU" in running
    assert "WAITING" in waiting
    assert "3rd zone of 4" in waiting


def test_colour_changes_no_text(afternoon: list[dict[str, Any]]) -> None:
    from drumline.cli.rendering.text import sanitize

    coloured = render_list(afternoon, colour=True)
    assert "\x1b[32m" in coloured[1]
    assert [sanitize(line) for line in coloured] == render_list(afternoon)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        (
            {"reason": "2 failures, the last of the program on host 1 of 2: boom", "failures": 2},
            "2 failures, the last of the program on host 1 of 2: boom",
        ),
        (
            {"reason": "11 bad hosts, the last: host 0: gone", "bad_hosts": 11, "failures": 1},
            "11 bad hosts, the last: host 0: gone · 1 failure",
        ),
        (
            {"reason": "1 failure of the program on host 0 of 1: x", "failures": 1,
             "preemptions": 3},
            "1 failure of the program on host 0 of 1: x · 3 preemptions",
        ),
    ],
)  # fmt: skip
def test_the_note_of_a_failed_job_has_each_count_once(
    a_job: Make, changes: dict[str, Any], note: str
) -> None:
    failed = a_job(status="FAILED", **{"preemptions": 0, "progress": None, **changes})
    assert render_list([failed])[1].endswith(f"–         {note}")


def listed(lines: list[str]) -> list[str]:
    """Return the ids in the rows of a table."""
    return [line.split()[0] for line in lines[1:-1] if not line.startswith("…")]


@pytest.fixture
def mixed(a_job: Make) -> list[dict[str, Any]]:
    """Ended jobs around a running one, a cancelled one with its slice, and a waiting one."""
    free = {"chips_held": 0, "cost_per_hour": None}
    return [
        a_job("000001", status="FAILED", **free),
        a_job("000002"),
        a_job("000003", status="SUCCEEDED", **free),
        a_job("000004", status="CANCELLED"),
        a_job("000005", status="WAITING", **free),
        a_job("000006", status="FAILED", **free),
    ]


def test_active_jobs_come_first_and_then_the_newest_ended_ones(mixed: list[dict[str, Any]]) -> None:
    order = ["000002", "000004", "000005", "000006", "000003", "000001"]
    assert listed(render_list(mixed)) == order
    assert listed(render_list(mixed, columns=200, rows=7)) == order[:4]


def test_watch_puts_active_jobs_first(
    server: Any,
    mixed: list[dict[str, Any]],
    drumline: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.holds(*mixed)

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("drumline.cli.jobs.time.sleep", interrupt)
    assert drumline("list", "--watch") == 130
    out = capsys.readouterr().out.splitlines()
    assert [line[:6] for line in out[1:4]] == ["000002", "000004", "000005"]


def test_a_short_terminal_gets_the_first_jobs_and_the_summary(a_job: Make) -> None:
    jobs = [a_job(f"{n:06}") for n in range(1, 31)]
    lines = render_list(jobs, columns=200, rows=10)
    assert len(lines) == 10
    assert lines[-2] == "… and 23 more"
    assert lines[-1].startswith("30 slices held")


def test_ctrl_c_ends_watch_and_no_job(
    server: Any,
    a_job: Make,
    drumline: Run,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server.holds(a_job())
    looks = 0

    def interrupt_at_the_third(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("drumline.cli.jobs.time.sleep", interrupt_at_the_third)
    assert drumline("list", "--watch") == 130
    captured = capsys.readouterr()
    assert captured.out.count("JOB ID") == 1  # a pipe gets only changes
    assert "the jobs keep running" in captured.err


def test_list_imports_nothing_heavy(server: Any, a_job: Make) -> None:
    server.holds(a_job())
    script = (
        "import sys\n"
        "from drumline.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'jax', 'httpx', 'asyncssh', 'google', 'rich', 'pydantic', 'starlette', 'yaml'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)\n"
    )
    command = [sys.executable, "-c", script, "list"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "llama-1b" in ended.stdout
