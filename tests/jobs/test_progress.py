from drumline.hosts.values import HostPhase, HostReport
from drumline.jobs.progress import progress_of

MAXTEXT = r"completed step: (?P<step>\d+), .*loss: (?P<loss>[\d.]+)"


def host(**facts: object) -> HostReport:
    return HostReport(0, HostPhase.RUNNING, heard=1.0, **facts)  # type: ignore[arg-type]


def test_a_heartbeat_needs_no_pattern() -> None:
    assert progress_of([host(heartbeat={"step": 3})], MAXTEXT) == {"step": 3}


def test_a_program_that_cannot_be_changed_is_read_by_its_log() -> None:
    lines = ("completed step: 7, seconds: 1.2, loss: 10.5", "completed step: 8, x, loss: 9.25", "–")
    assert progress_of([host(tail=lines)], MAXTEXT) == {"step": 8, "loss": 9.25}


def test_a_thousands_separator_is_no_obstacle() -> None:
    assert progress_of([host(tail=("step 18,400",))], r"step (?P<step>[\d,]+)") == {"step": 18400}


def test_without_either_nothing_is_told() -> None:
    assert progress_of([host(tail=("hello",))], None) is None
    assert progress_of([host(tail=("hello",))], MAXTEXT) is None
