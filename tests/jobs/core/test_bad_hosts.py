import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.health.fault_report import FaultReport
from drumline.jobs.core.causes import find_fault_report, indicates_bad_host

BAD_HOST_TEXTS = (
    "Couldn't open iommu group",
    "open(/dev/vfio",
    "Failed to initialize TPU system",
    "TPU initialization failed",
    "No accelerator found",
)
STALE_HOLDER_TEXTS = (
    "libtpu.so already in use by another process",
    "a left-over /tmp/libtpu_lockfile",
)
BACKEND = "RuntimeError: Unable to initialize backend 'tpu': UNKNOWN: "
TRACEBACK = 'Traceback (most recent call last):\n  File "train.py", line 3, in <module>\n'


@pytest.mark.parametrize("text", BAD_HOST_TEXTS)
def test_a_host_phrase_counts_only_when_the_program_failed(text: str) -> None:
    log = f"step 1\n{TRACEBACK}{BACKEND}{text}: nope"
    assert indicates_bad_host(1, log)
    assert indicates_bad_host(-6, f"F0000 {text}")
    assert not indicates_bad_host(0, log)
    assert not indicates_bad_host(None, log)


def test_a_warning_before_the_users_own_error_is_not_the_cause() -> None:
    log = f"W0000 TPU initialization failed, trying again\nstep 100\n{TRACEBACK}ValueError: shapes"
    assert not indicates_bad_host(1, log)


def test_the_library_may_log_the_reason_before_the_exception() -> None:
    log = f"E0000 Couldn't open iommu group /dev/vfio/0\n{TRACEBACK}{BACKEND}INTERNAL"
    assert indicates_bad_host(1, log)


def test_the_reason_may_stand_in_the_first_of_two_chained_tracebacks() -> None:
    log = (
        f"{TRACEBACK}RuntimeError: TPU initialization failed\n\nDuring handling of the above "
        f"exception, another exception occurred:\n\n{TRACEBACK}SystemError: gave up"
    )
    assert indicates_bad_host(1, log)


def test_a_stale_holder_is_no_bad_host() -> None:
    log = "TPU initialization failed: libtpu.so already in use by another process"
    assert not indicates_bad_host(1, log)


def test_an_ordinary_failure_is_no_bad_host() -> None:
    assert not indicates_bad_host(1, f"{TRACEBACK}KeyError: 'accelerator'")


@pytest.mark.parametrize("text", STALE_HOLDER_TEXTS)
def test_a_host_with_busy_chips_is_not_bad(text: str) -> None:
    assert not indicates_bad_host(1, f"No accelerator found: {text}")


pieces = st.sampled_from([*BAD_HOST_TEXTS, *STALE_HOLDER_TEXTS, TRACEBACK, BACKEND])
texts = st.lists(st.text() | pieces).map(" ".join)


@given(st.none() | st.integers(-64, 255), texts)
def test_any_log_can_be_judged(exit_code: int | None, text: str) -> None:
    assert indicates_bad_host(exit_code, text) in {False, bool(exit_code)}


@given(st.text(), st.sampled_from(['There is no more capacity in the zone "x"', *BAD_HOST_TEXTS]))
def test_a_success_is_never_a_bad_host(around: str, phrase: str) -> None:
    assert not indicates_bad_host(0, f"{around}{phrase}{around}")


@pytest.mark.parametrize(
    "text",
    [
        "Check failed: device->index_on_host() == i (0 vs. 1)",
        "SLICE_FAILURE_CHIP_DRIVER_ERROR",
        "Mesh build was incomplete, unassigned nodes: 2",
        "your job hit a bad TPU hardware. Physical location: tpu3:pe2:2",
        "worker 3 missed 5 health checks",
    ],
)
def test_chip_errors_of_libtpu_indicate_a_bad_host(text: str) -> None:
    assert indicates_bad_host(1, f"F0000 {text}")


@pytest.mark.parametrize(
    "text",
    ["SW_INJECT_ERROR", "a different launch id", "RESOURCE_EXHAUSTED: 20G of 16G hbm"],
)
def test_an_error_caused_elsewhere_does_not_indicate_a_bad_host(text: str) -> None:
    assert not indicates_bad_host(1, f"F0000 {text}: SLICE_FAILURE_CHIP_DRIVER_ERROR")


def test_a_segmentation_fault_indicates_a_bad_host_only_at_the_start() -> None:
    assert indicates_bad_host(139, "", run_seconds=12.0)
    assert indicates_bad_host(-11, "", run_seconds=0.0)
    assert not indicates_bad_host(139, "", run_seconds=3600.0)
    assert not indicates_bad_host(139, "")
    assert not indicates_bad_host(1, "", run_seconds=12.0)


@pytest.mark.parametrize(("host", "chip"), [(1, 5), (1, None), (None, None)])
def test_fault_reports_are_found_and_one_that_names_a_host_comes_first(
    host: int | None, chip: int | None
) -> None:
    report = FaultReport("a checksum", host, chip)
    log = f"step 1\ntrain.py:3  HardwareFault: {report.sentence}\nbye"
    assert find_fault_report(log) == report
    named = FaultReport("another", 0, 2)
    assert find_fault_report(f"{log}\n{named.sentence}") == (report if host is not None else named)
    assert find_fault_report("step 1\nbye") is None
