import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.jobs.core.bad_hosts import blames_host

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
    assert blames_host(1, log)
    assert blames_host(-6, f"F0000 {text}")
    assert not blames_host(0, log)
    assert not blames_host(None, log)


def test_a_warning_before_the_users_own_error_is_not_the_cause() -> None:
    log = f"W0000 TPU initialization failed, trying again\nstep 100\n{TRACEBACK}ValueError: shapes"
    assert not blames_host(1, log)


def test_the_library_may_log_the_reason_before_the_exception() -> None:
    log = f"E0000 Couldn't open iommu group /dev/vfio/0\n{TRACEBACK}{BACKEND}INTERNAL"
    assert blames_host(1, log)


def test_the_reason_may_stand_in_the_first_of_two_chained_tracebacks() -> None:
    log = (
        f"{TRACEBACK}RuntimeError: TPU initialization failed\n\nDuring handling of the above "
        f"exception, another exception occurred:\n\n{TRACEBACK}SystemError: gave up"
    )
    assert blames_host(1, log)


def test_a_stale_holder_is_no_bad_host() -> None:
    log = "TPU initialization failed: libtpu.so already in use by another process"
    assert not blames_host(1, log)


def test_an_ordinary_failure_is_no_bad_host() -> None:
    assert not blames_host(1, f"{TRACEBACK}KeyError: 'accelerator'")


@pytest.mark.parametrize("text", STALE_HOLDER_TEXTS)
def test_nor_is_one_whose_chips_are_held(text: str) -> None:
    assert not blames_host(1, f"No accelerator found: {text}")


pieces = st.sampled_from([*BAD_HOST_TEXTS, *STALE_HOLDER_TEXTS, TRACEBACK, BACKEND])
texts = st.lists(st.text() | pieces).map(" ".join)


@given(st.none() | st.integers(-64, 255), texts)
def test_any_log_can_be_judged(exit_code: int | None, text: str) -> None:
    assert blames_host(exit_code, text) in {False, bool(exit_code)}


@given(st.text(), st.sampled_from(['There is no more capacity in the zone "x"', *BAD_HOST_TEXTS]))
def test_a_success_is_never_a_bad_host(around: str, phrase: str) -> None:
    assert not blames_host(0, f"{around}{phrase}{around}")
