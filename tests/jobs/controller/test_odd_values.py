"""Invalid metrics of a program do not disturb other jobs."""

import asyncio
import json
from pathlib import Path

import pytest
from starlette.datastructures import QueryParams

from drumline.cli.rendering.views import is_number, render_list
from drumline.hosts.agent.wire import decode
from drumline.jobs.client import Client, Refused
from drumline.jobs.controller.heartbeats import LogReader, clean
from drumline.jobs.core.steps import to_number
from drumline.jobs.server.api import parse_search
from drumline.jobs.server.verbs import RequestError
from tests.jobs.fakes import ServerHarness, run_scenario

HUGE = int("9" * 500)


@pytest.mark.parametrize("figure", [HUGE, -HUGE, 2**63, -(2**63), 2.0**63, float("nan"), 1e400])
def test_a_figure_that_is_too_large_is_none(figure: float) -> None:
    assert to_number(figure) is None
    assert not is_number(figure)
    json.dumps(clean({"step": figure, "loss": 1.0}), allow_nan=False)


def test_figures_up_to_the_limit_are_kept() -> None:
    for figure in (0, -1, 2**62, 1e18, -0.5):
        assert to_number(figure) == figure
        assert clean({"x": figure}) == {"x": figure}


def test_a_job_that_reports_a_huge_step_does_not_affect_other_jobs(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        odd, plain_one = await harness.create(), await harness.create()
        for job in (odd, plain_one):
            await harness.reaches(job, "RUNNING")
        for step in range(1, 20):
            harness.starts(odd)[0].send_heartbeat(step=HUGE + step, loss=HUGE)
            harness.starts(plain_one)[0].send_heartbeat(step=step, loss=1 / step)
            await asyncio.sleep(1)
        await asyncio.sleep(60)
        assert len(render_list(harness.service.overview())) == 4
        assert harness.supervisor.store.metrics.points(plain_one)
        for job in (odd, plain_one):
            harness.starts(job)[0].ends(0)
            await harness.reaches(job, "SUCCEEDED")

    run_scenario(tmp_path, scenario)


def test_a_write_that_fails_for_one_job_is_made_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(harness: ServerHarness) -> None:
        jobs = [await harness.create() for _ in range(3)]
        for job in jobs:
            await harness.reaches(job, "RUNNING")
        metrics = harness.supervisor.store.metrics
        put = metrics.save

        def broken(job_id: str, *rest: object) -> None:
            if job_id == jobs[0]:
                raise OverflowError("too large")
            put(job_id, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(metrics, "save", broken)
        for step in range(1, 20):
            for job in jobs:
                harness.starts(job)[0].send_heartbeat(step=step)
            await asyncio.sleep(1)
        await asyncio.sleep(30)
        assert [bool(metrics.points(job)) for job in jobs] == [False, True, True]
        monkeypatch.undo()

    run_scenario(tmp_path, scenario)


def test_endless_digits_from_a_host_become_text() -> None:
    assert decode(b'{"step": 12, "loss": ' + b"9" * 6000 + b"}")["step"] == 12
    assert isinstance(decode(b'{"loss": ' + b"9" * 6000 + b"}")["loss"], str)


def test_endless_digits_in_a_log_are_no_number(tmp_path: Path) -> None:
    (tmp_path / "host-0.log").write_text(f"step 7\nstep {'9' * 480}\n")
    reports = LogReader(tmp_path, r"step (?P<step>\S+)").read_new()
    assert [type(one["step"]) for one in reports] == [int, str]


def test_a_number_that_no_job_can_have_is_one_sentence(tmp_path: Path) -> None:
    async def scenario(harness: ServerHarness) -> None:
        for odd in ("9" * 30, "x" * 5, "१२"):
            with pytest.raises(RequestError, match="there is no job"):
                harness.service.show(odd)

    run_scenario(tmp_path, scenario)
    with pytest.raises(RequestError, match=r"limit: .* is not a number above 0"):
        parse_search(QueryParams(f"limit={'9' * 30}"))
    with pytest.raises(Refused, match="longer than any name"):
        Client(tmp_path / "h", autostart=False).list(name="x" * 100_000)
