"""A fault report contains all that is known and can be parsed from a log."""

import pytest

from drumline import health
from drumline.health import FaultReport, HardwareFault
from drumline.health.fault_report import parse_fault_report
from drumline.health.report import CheckOutcome, HealthReport


@pytest.mark.parametrize(
    ("host", "chip", "line"),
    [
        (1, 5, "drumline: chip 5 of host 1 computes wrong: 2 + 2 = 5"),
        (1, None, "drumline: host 1 computes wrong: 2 + 2 = 5"),
        (None, None, "drumline: a chip of this slice computes wrong: 2 + 2 = 5"),
    ],
)
def test_a_report_is_printed_and_parsed(host: int | None, chip: int | None, line: str) -> None:
    report = FaultReport("2 + 2 = 5", host, chip)
    assert report.sentence == line
    assert parse_fault_report(f"drumline.health.HardwareFault: {line}\n") == report


def test_line_breaks_in_the_reason_become_spaces() -> None:
    report = FaultReport("one\n  two", host=0)
    assert parse_fault_report(report.sentence) == FaultReport("one two", 0)


def test_other_lines_are_no_reports() -> None:
    assert parse_fault_report("chip 5 of host 1 computes wrong: says who?") is None
    assert parse_fault_report("drumline: host 1 is slow: 2 s a step") is None


def test_a_chip_needs_a_host() -> None:
    with pytest.raises(ValueError, match="name the host too"):
        FaultReport("wrong", chip=3)


def test_the_exception_has_the_sentence_and_the_fields() -> None:
    fault = HardwareFault("2 + 2 = 5", host=1, chip=5)
    assert str(fault) == FaultReport("2 + 2 = 5", host=1, chip=5).sentence
    assert (fault.reason, fault.host, fault.chip) == ("2 + 2 = 5", 1, 5)


@pytest.mark.parametrize(
    ("old_name", "new_name"),
    [
        ("Accusation", "FaultReport"),
        ("Blamed", "ReplicaComparison"),
        ("blame", "compare_replicas"),
    ],
)
def test_old_names_warn_and_work(old_name: str, new_name: str) -> None:
    with pytest.warns(DeprecationWarning, match=new_name):
        assert getattr(health, old_name) is getattr(health, new_name)


def test_old_attributes_and_keywords_warn_and_work() -> None:
    with pytest.warns(DeprecationWarning, match="reason"):
        report = FaultReport(why="x", host=1)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="FaultReport.reason"):
        assert report.why == "x"
    with pytest.warns(DeprecationWarning, match="reason"):
        fault = HardwareFault(why="x", host=1)  # type: ignore[call-arg]
    with pytest.warns(DeprecationWarning, match="HardwareFault.reason"):
        assert fault.why == "x"
    health_report = HealthReport("fail", "bad", faults=(report,))
    with pytest.warns(DeprecationWarning, match="HealthReport.message"):
        assert health_report.said == "bad"
    with pytest.warns(DeprecationWarning, match="HealthReport.faults"):
        assert health_report.accusations == (report,)
    with pytest.warns(DeprecationWarning, match="CheckOutcome.message"):
        assert CheckOutcome(message="slow").said == "slow"
    comparison = health.compare_replicas([{0: 1, 1: 1, 2: 2}])
    with pytest.warns(DeprecationWarning, match="ReplicaComparison.run_counts"):
        assert comparison.times == {2: 1}
