"""`drumline plot`: the loss across attempts, in a terminal and as a picture."""

import json
import math
import random
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.rendering.plot import Drawing, draw, render_chart, svg, ticks
from drumline.cli.rendering.text import display_width, sanitize

Run = Callable[..., int]
Make = Callable[..., dict[str, Any]]
Printed = pytest.CaptureFixture[str]
NAMESPACE = "{http://www.w3.org/2000/svg}"


def attempt(number: int, outcome: str | None, step: float, resumed: float | None) -> dict[str, Any]:
    course = {"step": step, "stepped_at": 100.0 * number, "resumed": resumed}
    return {"number": number, "outcome": outcome, "course": course}


@pytest.fixture
def history(a_job: Make) -> dict[str, Any]:
    """A history: preempted at step 151 with a checkpoint at 140, stuck at 230 with one at 230, then
    done.
    """
    chance = random.Random(1)
    points = []
    for number, begin, end in ((1, 1, 151), (2, 141, 230), (3, 231, 300)):
        for step in range(begin, end + 1):
            loss = 2 * math.exp(-step / 80) + chance.gauss(0, 0.01)
            metrics = {"loss": loss, "rate": 9800.0}
            points.append({"attempt": number, "time": 1000.0 + step, "step": step,
                           "metrics": metrics})  # fmt: skip
    return {
        "job": a_job("000001", name="digits"),
        "points": points,
        "attempts": [
            attempt(1, "preempted", 151, 0),
            attempt(2, "stuck", 230, 140),
            attempt(3, "succeeded", 300, 230),
        ],
        "steps_again": 11,
    }


def test_a_drawing_has_the_interruption_of_each_attempt(history: dict[str, Any]) -> None:
    drawing = draw(history, None)
    assert drawing.title == "000001 digits · loss"
    assert [(one.x, one.label) for one in drawing.interruptions] == [
        (151, "preempted"),
        (230, "stuck"),
    ]
    assert drawing.rerun_steps == ((140, 151),)
    assert drawing.notes == ("3 attempts", "1 preempted", "1 stuck", "11 steps repeated")


def test_a_plot_counts_the_attempts_that_reported_no_step(history: dict[str, Any]) -> None:
    silent = {"number": 4, "outcome": "set-up failed", "course": None}
    history["attempts"].insert(2, silent | {"outcome": "preempted"})
    history["attempts"].append(silent)
    drawing = draw(history, None)
    assert drawing.notes[:4] == ("5 attempts", "2 preempted", "1 stuck", "1 set-up failed")
    assert len(drawing.interruptions) == 2, "only attempts with steps have a place"
    history["points"] = [point for point in history["points"] if point["attempt"] == 1]
    assert "5 attempts" in render_chart(draw(history, None), columns=80, rows=20)[-1]


def test_a_chart_has_axes_curves_and_interruptions(history: dict[str, Any]) -> None:
    lines = render_chart(draw(history, None), columns=80, rows=20)
    assert len(lines) <= 20
    assert max(map(display_width, lines)) <= 80
    body = lines[1:-3]
    assert sum(line.count("┊") for line in body) > 16
    # The loss falls, so the line starts at the top left and ends at the bottom right.
    top, bottom = body[0].split("│")[-1], body[-1].split("│")[-1]
    assert dots(top)
    assert dots(bottom)
    assert max(dots(top)) < min(dots(bottom))
    assert "━" in lines[-3], "the repeated steps"
    assert lines[-2].rstrip().endswith("step")
    assert lines[-1].strip() == "┊ 3 attempts · 1 preempted · 1 stuck · 11 steps repeated (━)"


def dots(text: str) -> list[int]:
    return [column for column, one in enumerate(text) if "\u2800" < one <= "\u28ff"]


def test_colour_changes_no_character_of_a_chart(history: dict[str, Any]) -> None:
    drawing = draw(history, None)
    coloured = render_chart(drawing, columns=80, rows=20, colour=True)
    assert any("\x1b[36m" in line for line in coloured)
    assert any("\x1b[34m" in line for line in coloured)
    plain = render_chart(drawing, columns=80, rows=20)
    assert [sanitize(line).rstrip() for line in coloured] == plain


@pytest.mark.parametrize(("columns", "rows"), [(40, 10), (300, 60), (1, 1)])
def test_a_chart_fits_any_terminal(history: dict[str, Any], columns: int, rows: int) -> None:
    assert render_chart(draw(history, None), columns, rows)


def shapes(drawing: Drawing, kind: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(svg(drawing))  # noqa: S314 - our own
    return list(root.iter(NAMESPACE + kind))


def test_a_picture_has_curves_interruptions_and_rerun_steps(
    history: dict[str, Any],
) -> None:
    drawing = draw(history, None)
    curves = [one for one in shapes(drawing, "path") if one.get("stroke-width")]
    assert [one.get("stroke") for one in curves][0::2] == [curves[0].get("stroke")] * 2
    assert curves[0].get("stroke") != curves[1].get("stroke")
    broken = [one for one in shapes(drawing, "line") if one.get("stroke-dasharray")]
    assert len(broken) == 2
    words = [one.text for one in shapes(drawing, "text")]
    assert {"preempted", "stuck", "step", "loss", "0.5", "300", "000001 digits · loss"} <= set(
        words
    )
    again = [one[0].text for one in shapes(drawing, "rect") if len(one)]
    assert again == ["steps 140 to 151 repeated"]


def test_text_in_a_picture_is_escaped(history: dict[str, Any]) -> None:
    history["job"]["name"] = "<script>alert('x')</script>\x1b[2J"
    for point in history["points"]:
        point["metrics"] = {"a<b>&\"'": 1.0}
    picture = svg(draw(history, "a<b>&\"'"))
    assert "<script" not in picture
    assert "\x1b" not in picture
    ElementTree.fromstring(picture)  # noqa: S314 - our own


@pytest.mark.parametrize(
    "losses",
    [[0.5], [0.5, 0.5, 0.5], [0.0, 0.0], [-3.0, 5.0], [1e-9, 2e-9], [1e9, 1e12], [None, 1.0, None]],
)
def test_any_metrics_can_be_drawn(history: dict[str, Any], losses: list[float | None]) -> None:
    reports = [{} if one is None else {"loss": one} for one in losses]
    history["points"] = [
        {"attempt": 1, "time": 1.0 + n, "step": 5 + n, "metrics": metrics}
        for n, metrics in enumerate(reports)
    ]
    drawing = draw(history, "loss")
    assert dots("".join(render_chart(drawing, 80, 20)))
    curves = [one for one in shapes(drawing, "path") if one.get("stroke-width")]
    assert shapes(drawing, "circle") or curves


def test_missing_values_are_gaps_in_the_curve(history: dict[str, Any]) -> None:
    for point in history["points"][50:60]:
        del point["metrics"]["loss"]
    assert [len(curve.segments) for curve in draw(history, None).curves] == [2, 1, 1]


def test_without_a_loss_the_step_is_drawn_over_time(history: dict[str, Any]) -> None:
    for point in history["points"]:
        point["metrics"] = {}
    drawing = draw(history, None)
    assert (drawing.y.label, drawing.x.label) == ("step", "minutes")
    assert drawing.rerun_steps == ()


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 300, (0, 50, 100, 150, 200, 250, 300)),
        (0.09, 2.31, (0.5, 1.0, 1.5, 2.0)),
        (18000, 50000, (20000, 30000, 40000, 50000)),
        (-1, 1, (-1.0, -0.5, 0.0, 0.5, 1.0)),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: tuple[float, ...]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


# The command line


def test_a_plot_in_a_pipe_has_no_escapes(
    server: Any, history: dict[str, Any], drumline: Run, capsys: Printed
) -> None:
    server.answers["GET /jobs/000001/history"] = history
    assert drumline("plot", "1") == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert out.startswith("000001 digits · loss\n")


def test_plot_writes_a_picture(
    server: Any, history: dict[str, Any], drumline: Run, capsys: Printed, tmp_path: Path
) -> None:
    server.answers["GET /jobs/000001/history"] = history
    file = tmp_path / "rate.svg"
    assert drumline("plot", "1", "--metric", "rate", "--output", str(file)) == 0
    output = capsys.readouterr().out
    assert output.startswith(f"wrote {file}: 000001 digits · rate · 3 attempts · 1 preempted")
    assert ElementTree.parse(file).getroot().tag == NAMESPACE + "svg"  # noqa: S314 - our own


def test_plot_as_json_is_the_history(
    server: Any, history: dict[str, Any], drumline: Run, capsys: Printed
) -> None:
    server.answers["GET /jobs/000001/history"] = history
    assert drumline("plot", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out) == history


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--metric", "accuracy"),
            "--metric accuracy: 000001 does not report it; it reports loss, rate",
        ),
        (("--output", "loss.png"), "--output loss.png: the format is SVG; name it loss.svg"),
        (("--output", "/no/such/folder/x.svg"), "cannot be written: No such file or directory"),
    ],
)
def test_an_invalid_option_is_one_message(
    server: Any,
    history: dict[str, Any],
    drumline: Run,
    capsys: Printed,
    words: tuple[str, ...],
    message: str,
) -> None:
    server.answers["GET /jobs/000001/history"] = history
    assert drumline("plot", "1", *words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def test_a_job_without_metrics_shows_how_to_report_them(
    server: Any, history: dict[str, Any], drumline: Run, capsys: Printed
) -> None:
    server.answers["GET /jobs/000001/history"] = history | {"points": []}
    assert drumline("plot", "1") == 2
    assert "has not reported any step yet; a program reports steps with drumline.heartbeat" in (
        capsys.readouterr().err
    )
