"""A pattern that backtracks blocks neither the server nor its author."""

import re
import signal
import threading
import time
from pathlib import Path

import pytest

from drumline.jobs.controller import heartbeats
from drumline.jobs.patterns import TooSlow, find_slow_line, limited
from drumline.jobs.spec import SpecError, validate
from tests.jobs.fakes import ServerHarness, run_scenario

ENDLESS = r"(?P<step>(\d+)+)x"
SLOW_ON_PROSE = r"(?P<step>\d+)?(.*e)?(.*e)?(.*e)?(.*e)?(.*e)?(.*e)?(.*e)?Q"
"""This pattern passes the trial at create, and would take hours for a long line of e's."""


def test_a_match_that_would_take_years_is_ended() -> None:
    began = time.process_time()
    with pytest.raises(TooSlow), limited(0.1):
        re.search(ENDLESS, "7" * 60)
    assert time.process_time() - began < 1.0


def test_a_match_in_time_is_left_alone_and_no_timer_stays_behind() -> None:
    before = signal.getsignal(signal.SIGVTALRM)
    with limited(0.2):
        assert re.search(r"step (?P<step>\d+)", "at step 12")
    deadline = time.process_time() + 0.4
    while time.process_time() < deadline:
        pass
    assert signal.getsignal(signal.SIGVTALRM) is before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_in_another_thread_a_match_is_not_limited_and_not_an_error() -> None:
    matches: list[object] = []

    def search() -> None:
        with limited(0.2):
            matches.append(re.search("b", "abc"))

    thread = threading.Thread(target=search)
    thread.start()
    thread.join()
    assert matches[0]


def test_a_pattern_that_backtracks_is_refused_at_create_with_the_mend() -> None:
    spec = {"accelerator": "v4-8", "run": "x", "progress": ENDLESS}
    with pytest.raises(SpecError, match=r"progress: .*a line of 60 '7'.*write \\d\+"):
        validate(spec)


@pytest.mark.parametrize(
    "pattern",
    [
        r"step (?P<step>\d+)",
        r"completed step: (?P<step>\d+), .*loss: (?P<loss>\S+)",
        r"\[(?P<step>[\d,]+)/(?P<total>[\d,]+)\].*loss=(?P<loss>[\d.]+).*lr=(?P<lr>[\d.e-]+)",
        r"(?:\w+[: =]+)?step[: =]+(?P<step>\d+)",
    ],
)
def test_patterns_as_people_write_them_pass(pattern: str) -> None:
    assert find_slow_line(re.compile(pattern)) is None


def test_a_slow_pattern_is_dropped_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeats, "MATCH_SECONDS", 0.05)

    async def scenario(harness: ServerHarness) -> None:
        job = await harness.create(progress=SLOW_ON_PROSE)
        await harness.reaches(job, "RUNNING")
        began = time.process_time()
        logs = tmp_path / "logs" / job / "1"
        logs.mkdir(parents=True)
        (logs / "host-0.log").write_text("e" * 400 + "\n")
        (session,) = harness.starts(job)
        session.changed.set()
        await harness.until(lambda: "takes too long" in harness.show(job)["reason"])
        for _ in range(20):
            with (logs / "host-0.log").open("a") as log:
                log.write("e" * 400 + "\n")
            session.changed.set()
            await harness.until(lambda: not session.changed.is_set())
        assert time.process_time() - began < 5.0
        warnings = [e["text"] for e in harness.show(job)["events"] if e["kind"] == "warning"]
        assert len(warnings) == 1
        assert "its steps are no longer read" in warnings[0]
        other = await harness.create()
        await harness.reaches(other, "RUNNING")

    run_scenario(tmp_path, scenario)
