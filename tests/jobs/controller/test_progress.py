"""A program's progress, from heartbeats or from a pattern in its log."""

from pathlib import Path

from drumline.jobs.controller.heartbeats import LogReader, first_heartbeat
from drumline.observed import HostPhase, HostReport

MAXTEXT = r"completed step: (?P<step>\d+), .*loss: (?P<loss>[\d.]+)"


def host(index: int = 0, **facts: object) -> HostReport:
    return HostReport(index, HostPhase.RUNNING, heard_at=1.0, **facts)  # type: ignore[arg-type]


def test_progress_comes_from_the_first_host_with_a_heartbeat() -> None:
    reports = [host(), host(1, heartbeat={"step": 3}), host(2, heartbeat={"step": 2})]
    assert first_heartbeat(reports) == (1, {"step": 3})
    assert first_heartbeat([host(), host()]) is None


def write(folder: Path, text: str, number: int = 0) -> None:
    with (folder / f"host-{number}.log").open("a") as log:
        log.write(text)


def test_a_program_that_cannot_be_changed_is_read_by_its_log(tmp_path: Path) -> None:
    reader = LogReader(tmp_path, MAXTEXT)
    assert reader.read_new() == []
    write(tmp_path, "hello\ncompleted step: 7, seconds: 1.2, loss: 10.5\ncompleted step: 8, x, lo")
    assert reader.read_new() == [{"step": 7, "loss": 10.5}]
    write(tmp_path, "ss: 9.25\n" + "chatter\n" * 100)
    assert reader.read_new() == [{"step": 8, "loss": 9.25}], "however much is logged after it"
    assert reader.read_new() == []


def test_the_reporting_host_is_detected_and_kept(tmp_path: Path) -> None:
    write(tmp_path, "nothing\n", 0)
    write(tmp_path, "step 3\n", 10)
    write(tmp_path, "step 2\n", 9)
    reader = LogReader(tmp_path, r"step (?P<step>\d+)")
    assert reader.read_new() == [{"step": 2}]
    write(tmp_path, "step 99\n", 0)
    assert reader.read_new() == []


def test_a_bar_of_progress_and_separated_thousands_are_no_obstacle(tmp_path: Path) -> None:
    write(tmp_path, "step 18,399\rstep 18,400\rstep 18,4")
    assert LogReader(tmp_path, r"step (?P<step>[\d,]+)").read_new() == [
        {"step": 18399},
        {"step": 18400},
    ]


def test_of_a_huge_log_the_end_alone_is_read(tmp_path: Path) -> None:
    write(tmp_path, "step 1\n" + "x" * (1 << 20) + "\nstep 2\n")
    assert LogReader(tmp_path, r"step (?P<step>\d+)").read_new() == [{"step": 2}]
