"""The summary sentences of a profile, and the output of the command."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from drumline.cli.inspect import profile as command
from drumline.errors import UserError
from drumline.inspect.profiles import (
    MeasuredCollective,
    MeasuredDevice,
    MeasuredOperation,
    Profile,
)
from drumline.inspect.profiles.reading import trace_files
from drumline.inspect.profiles.report import (
    EstimatedStep,
    compare_profile,
    format_duration,
    summarize,
)
from tests.inspect.profiles.test_tpu import DOT, REDUCE, tpu
from tests.inspect.profiles.traces import TraceEvent, write


def run(*arguments: object) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_message(*arguments: object) -> str:
    """Return the error message that the command line prints before it exits with 2."""
    result = run(*arguments).exception
    assert isinstance(result, UserError), result
    assert "\n" not in str(result)
    return str(result)


def make_profile(**changes: Any) -> Profile:
    fields: dict[str, Any] = {
        "path": Path("trace"),
        "platform": "TPU",
        "module": "jit_step",
        "steps": 2,
        "steps_from": "the device's steps",
        "devices": (MeasuredDevice("TPU 0", 1.0, 1.0, 0.38, 0.62, 0.0),),
        "communication": (MeasuredCollective("all-gather", "/x/block.py:88", 32, 0.62, 0.0),),
        "operations": (MeasuredOperation("fusion.1", "dot", "/x/block.py:90", 32, 0.38, 1),),
    }
    return Profile(**{**fields, **changes})


def test_one_sentence_names_the_wait_the_line_and_the_saving() -> None:
    assert summarize(make_profile()) == [
        "a step takes 1 s: 38 % computes, 62 % waits for communication, 0 % runs nothing",
        "62 % of the time waits for all-gather at block.py:88; "
        "overlapping it would save up to 38 %",
        "the largest operation is fusion.1 (dot) at block.py:90: 38 % of the time in 32 runs",
    ]


def test_without_free_computation_the_advice_is_to_send_less() -> None:
    result = summarize(make_profile(devices=(MeasuredDevice("TPU 0", 1.0, 1.0, 0.38, 0.62, 0.38),)))
    assert (
        "62 % of the time waits for all-gather at block.py:88; no computation is left to hide it "
        "behind: send less" in result
    )
    assert "38 % of the communication (380 ms) is hidden behind computation" in result


def test_an_idle_device_points_at_the_host() -> None:
    idle = MeasuredDevice("TPU 0", 1.0, 0.7, 0.7, 0.0, 0.0)
    result = summarize(make_profile(devices=(idle,), communication=()))
    assert any(line.startswith("30 % of the time the device has nothing to run") for line in result)


def test_a_summary_has_at_most_ten_sentences() -> None:
    collectives = tuple(
        MeasuredCollective("all-gather", f"a.py:{n}", 1, 0.1, 0.1) for n in range(9)
    )
    devices = tuple(MeasuredDevice(f"CPU {n}", 1.0, 0.8, n / 5, 0.3, 0.2) for n in (1, 2, 3))
    operations = (
        MeasuredOperation("copy.1", "copy", "", 1, 0.3, 1),
        MeasuredOperation("dot.1", "dot", "", 1, 0.2, 1),
    )
    profile = make_profile(
        platform="CPU", devices=devices, communication=collectives, operations=operations
    )
    estimate = EstimatedStep(0.1, 0.1, {}, {})
    result = summarize(profile, compare_profile(profile, estimate))
    assert len(result) == 10
    assert result[-4].startswith("measured 1 s a step where 100 ms were estimated, 10.00 times")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0"),
        (3e-9, "3 ns"),
        (1.5e-6, "1.5 µs"),
        (0.1234, "123 ms"),
        (0.9999, "1 s"),
        (1234.5, "1,234 s"),
        (-0.0021, "-2.1 ms"),
    ],
)
def test_times_have_three_figures(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path, tpu(XLA_Ops=[TraceEvent(REDUCE, 0, 80), TraceEvent(DOT, 80, 100)]))


def test_the_command_prints_tables_and_ends_with_the_summary(folder: Path) -> None:
    completed = run(folder)
    assert completed.exit_code == 0, completed.exception
    lines = completed.stdout.splitlines()
    assert lines[0].startswith("1 step on 1 TPU device · 100 µs a step")
    assert any(line.split()[:2] == ["all-reduce", "loss.py:5"] for line in lines)
    assert (
        "80 % of the time waits for all-reduce at loss.py:5; overlapping it would save up to 20 %"
        in lines
    )


def test_the_command_prints_json(folder: Path) -> None:
    report = json.loads(run(folder, "--json").stdout)
    assert report["exposed_seconds"] == pytest.approx(80e-6)
    assert report["communication"][0]["saving_seconds"] == pytest.approx(20e-6)
    assert report["summary"][0].startswith("a step takes 100 µs")


def test_an_estimate_is_compared_with_the_profile(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "estimate.json"
    gather = {"kind": "all-reduce", "axes": ["X"], "source": "loss.py:5", "seconds": 9e-5}
    operation = {"name": "d", "kind": "dot", "source": "model.py:31", "seconds": 2e-5, "count": 1}
    estimate = {
        "seconds": 3e-5,
        "compute_seconds": 2e-5,
        "communication": [{**gather, "exposed_seconds": 1e-5}],
        "operations": [operation],
    }
    file.write_text(json.dumps(estimate))
    completed = run(folder, "--estimate", file)
    assert "measured 100 µs a step where 30 µs were estimated, 3.33 times" in completed.stdout
    report = json.loads(run(folder, "--estimate", file, "--json").stdout)["estimate"]
    assert report["difference_seconds"] == pytest.approx(7e-5)
    assert report["parts"][0]["what"] == "wait for all-reduce"
    assert report["parts"][0]["difference_seconds"] == pytest.approx(7e-5)


def test_a_run_and_a_file_can_be_named_and_the_newest_run_is_taken(folder: Path) -> None:
    write(folder, tpu(XLA_Ops=[TraceEvent(DOT, 0, 7)]), run="2026_01_03_00_00_00")
    (newest,) = trace_files(folder)
    assert newest.parent.name == "2026_01_03_00_00_00"
    assert trace_files(newest.parent) == trace_files(newest) == [newest]


def test_the_error_for_a_folder_without_a_trace_explains_how_to_make_one(tmp_path: Path) -> None:
    assert "jax.profiler.trace(folder)" in error_message(tmp_path)
    (tmp_path / "plugins" / "profile" / "2026").mkdir(parents=True)
    (tmp_path / "plugins" / "profile" / "2026" / "vm.trace.json.gz").write_bytes(b"")
    assert "holds no trace" in error_message(tmp_path)
    assert "does not exist" in error_message(tmp_path / "nowhere")


def test_the_error_for_a_truncated_trace_names_the_file(folder: Path) -> None:
    (file,) = trace_files(folder)
    total = file.read_bytes()
    for length in (1, len(total) // 2, len(total) - 1):
        file.write_bytes(total[:length])
        assert "truncated" in error_message(folder)
    file.write_text("this was never a trace")
    assert str(file) in error_message(folder)


def test_the_error_for_a_trace_without_operations_explains_what_to_trace(tmp_path: Path) -> None:
    others: list[dict[str, list[TraceEvent]]] = [
        {},
        {"XLA_TraceMe": [TraceEvent("wait", 0, 9)]},
        {"XLA_Ops": []},
    ]
    for lines in others:
        assert "block_until_ready" in error_message(write(tmp_path, tpu(**lines)))
    (file,) = trace_files(tmp_path)
    file.write_bytes(b"")
    assert "no operation of any device" in error_message(tmp_path)


def test_the_error_for_a_missing_device_lists_the_existing_ones(folder: Path) -> None:
    assert "--device 3: the trace has device 0 alone" in error_message(folder, "--device", 3)
    planes = [tpu(n, XLA_Ops=[TraceEvent(DOT, 0, 7)]) for n in range(4)]
    write(folder, *planes)
    assert "devices 0 to 3" in error_message(folder, "--device", 9)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("no JSON", "is no JSON"),
        ("[1]", "it holds no object"),
        ('{"seconds": 1}', "'communication' is missing"),
        ('{"seconds": 1, "communication": [3], "operations": []}', "not an estimate of a step"),
        ('{"communication": [], "operations": []}', "'seconds' is missing"),
        (
            '{"seconds": "soon", "compute_seconds": 1, "communication": [], "operations": []}',
            "not an estimate of a step",
        ),
    ],
)
def test_the_error_for_an_invalid_estimate_names_the_fault(
    folder: Path, tmp_path: Path, content: str, fault: str
) -> None:
    file = tmp_path / "estimate.json"
    file.write_text(content)
    report = error_message(folder, "--estimate", file)
    assert fault in report
    assert "drumline inspect MODULE:FUNCTION --on SLICE --json" in report
    assert "cannot be read" in error_message(folder, "--estimate", tmp_path / "none.json")
