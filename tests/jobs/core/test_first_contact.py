"""A job whose hosts were never reached over SSH."""

import pytest

from drumline.hosts.contact import (
    CLOSED,
    KEY_REFUSED,
    LOCAL,
    MISSING_FILE,
    NO_ADDRESS,
    PROXY,
    REFUSED,
    TIMEOUT,
    UNREACHABLE,
)
from drumline.jobs.core.state import EffectType, Status
from drumline.observed import ContactFailure, HostPhase
from tests.jobs.scenario import TIMEOUTS, Scenario

NETWORK = [
    (TIMEOUT, "port 22"),
    (REFUSED, "port 22"),
    (UNREACHABLE, "no route"),
    (NO_ADDRESS, "external address"),
    (KEY_REFUSED, "OS Login"),
    (PROXY, "ssh.proxy_command"),
    (CLOSED, "before the login"),
]


def silent_slice(scenario: Scenario, *contacts: ContactFailure) -> Scenario:
    """Give the job a slice whose hosts never answer, and let the time for them pass."""
    scenario.slice_is_there()
    scenario.listening_since = scenario.now
    for index, contact in enumerate(contacts):
        scenario.host(index, HostPhase.CONNECTING, heard_at=None, contact=contact, detail="no")
    scenario.settle()
    scenario.now += TIMEOUTS.first_contact + 1
    return scenario.look("ACTIVE", "READY")


@pytest.mark.parametrize(("contact", "advice"), NETWORK)
def test_a_job_that_reached_no_host_of_its_first_slices_ends_with_the_reason(
    contact: ContactFailure, advice: str
) -> None:
    scenario = Scenario()
    slices = 0
    while not scenario.status().ended:
        slices += 1
        silent_slice(scenario, contact, contact)
        assert slices <= 2
    assert scenario.status() is Status.FAILED
    assert advice in scenario.job.reason, scenario.job.reason
    assert (scenario.job.bad_hosts, scenario.job.failures, scenario.job.cause) == (0, 0, None)
    assert set(scenario.outcomes) == {"unreachable"}
    assert len(scenario.did(EffectType.RELEASE)) == slices


@pytest.mark.parametrize("contact", [KEY_REFUSED, NO_ADDRESS])
def test_errors_of_keys_and_addresses_request_no_other_slice(
    contact: ContactFailure,
) -> None:
    scenario = silent_slice(Scenario(), contact, contact)
    assert scenario.status() is Status.FAILED


def test_the_reason_has_the_last_words_of_the_proxy_command() -> None:
    words = "the proxy command gcloud failed with exit status 1: ERROR: 4033: 'not authorized'"
    scenario = Scenario().slice_is_there()
    scenario.listening_since = scenario.now
    for index in range(2):
        scenario.host(index, HostPhase.CONNECTING, heard_at=None, contact=PROXY, detail=words)
    scenario.settle()
    scenario.now += TIMEOUTS.first_contact + 1
    scenario.look("ACTIVE", "READY")
    assert scenario.status() is Status.FAILED
    assert f"could be reached: {words}; correct ssh.proxy_command" in scenario.job.reason


def test_the_most_frequent_failure_is_the_reason() -> None:
    scenario = silent_slice(Scenario(), TIMEOUT, KEY_REFUSED)
    scenario = silent_slice(scenario, TIMEOUT, TIMEOUT)
    assert scenario.status() is Status.FAILED
    assert "firewall" in scenario.job.reason


def test_a_slice_that_the_cloud_took_is_a_preemption_even_if_no_host_was_reached() -> None:
    scenario = Scenario().slice_is_there()
    scenario.listening_since = scenario.now
    for index in range(2):
        scenario.host(index, HostPhase.CONNECTING, heard_at=None, contact=TIMEOUT)
    scenario.now += TIMEOUTS.first_contact + 1
    scenario.look("SUSPENDED", "PREEMPTED")
    assert scenario.outcomes == ["preempted"]


def test_one_silent_host_among_others_is_bad() -> None:
    scenario = Scenario().slice_is_there()
    scenario.listening_since = scenario.now
    scenario.host(0, HostPhase.READY)
    scenario.host(1, HostPhase.CONNECTING, heard_at=None, contact=TIMEOUT).settle()
    scenario.now += TIMEOUTS.first_contact + 1
    scenario.host(0, HostPhase.READY)
    scenario.look("ACTIVE", "READY")
    assert scenario.outcomes == ["bad host"]
    assert scenario.job.cause is not None
    assert scenario.job.cause.host == 1


def test_a_job_that_has_reached_hosts_before_blames_no_host_either() -> None:
    scenario = Scenario().runs()
    scenario.look("SUSPENDED", "PREEMPTED")
    for _ in range(3):
        assert not scenario.status().ended
        silent_slice(scenario, KEY_REFUSED, KEY_REFUSED)
    assert scenario.status() is Status.FAILED
    assert scenario.job.bad_hosts == 0


def test_a_running_program_is_not_ended_because_its_hosts_refuse_the_key() -> None:
    scenario = Scenario().runs()
    for index in range(2):
        scenario.host(
            index,
            HostPhase.RUNNING,
            heard_at=scenario.now,
            contact=KEY_REFUSED,
            detail="the host rejects Drumline's SSH key",
        )
    scenario.now += 3600
    scenario.look("ACTIVE", "READY")
    assert scenario.outcomes == []
    assert "rejects Drumline's SSH key" in scenario.job.reason


def test_a_proxy_that_fails_later_is_the_reason_and_no_evidence_against_the_host() -> None:
    words = "the proxy command gcloud failed with exit status 1: ERROR: gcloud auth login"
    scenario = Scenario().runs()
    for index in range(2):
        scenario.host(
            index,
            HostPhase.RUNNING,
            heard_at=scenario.now,
            contact=PROXY,
            detail=words,
        )
    scenario.now += 3600
    scenario.look("ACTIVE", "READY")
    assert scenario.job.cause is not None
    assert words in scenario.job.cause.error
    assert scenario.job.cause.proof == ""


def test_too_many_open_files_here_are_no_silence_of_a_host() -> None:
    scenario = silent_slice(Scenario(), LOCAL, LOCAL)
    scenario.passes(36_000)
    assert scenario.outcomes == []
    assert not scenario.status().ended
    assert "this machine" in scenario.job.reason


def test_a_missing_file_here_ends_the_job_and_not_the_host() -> None:
    scenario = Scenario().slice_is_there()
    scenario.listening_since = scenario.now
    missing = "the SSH key /home/me/.drumline/ssh/id_ed25519 is missing"
    for index in range(2):
        scenario.host(
            index,
            HostPhase.CONNECTING,
            heard_at=None,
            contact=MISSING_FILE,
            detail=missing,
        )
    scenario.settle()
    assert not scenario.status().ended
    scenario.passes(TIMEOUTS.silence + 1)
    assert scenario.status() is Status.FAILED
    assert missing in scenario.job.reason
    assert (scenario.job.bad_hosts, scenario.job.failures) == (0, 0)
