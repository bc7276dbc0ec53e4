"""The contents of the host history, and their expiry."""

from dataclasses import replace

from drumline.jobs.core import host_history
from drumline.jobs.core.host_history import (
    EXCLUSION_SECONDS,
    POSITION_SECONDS,
    SUSPICION_SECONDS,
    Evidence,
    EvidenceType,
    HostName,
    HostRecord,
    HostState,
    Strength,
)

NOW = 1_000_000.0
GOOD, SUSPECT, EXCLUDED = HostState.GOOD, HostState.SUSPECT, HostState.EXCLUDED


def host(number: int = 0, strength: Strength = Strength.MACHINE) -> HostRecord:
    name = HostName(f"machine-{number}", strength, "us-central2-b", "v4-16")
    return host_history.record_use(None, name, "000001", NOW)


def against(
    proof: EvidenceType, at: float = NOW, job: str = "000001", located: bool = False
) -> Evidence:
    return Evidence(proof, "its chip 2 computes wrong", at, job, 1, located)


def test_a_host_that_was_only_met_is_good() -> None:
    known = host_history.record_use(host(), host().name, "000002", NOW + 5)
    assert (known.state(NOW + 5), known.times_seen, known.last_job) == (GOOD, 2, "000002")
    assert known.expires(NOW + 5) is None
    assert not known.refused(NOW + 5)


def test_a_measured_fault_excludes_for_a_week_and_is_examined_again() -> None:
    known = host_history.add_evidence(host(), against(EvidenceType.BURN_IN), [])
    assert known.state(NOW) is EXCLUDED
    assert known.expires(NOW) == NOW + EXCLUSION_SECONDS
    assert not known.refused(NOW)
    assert known.state(NOW + EXCLUSION_SECONDS + 1) is GOOD


def test_a_long_burn_in_that_passes_makes_it_suspect_and_the_next_fault_excludes_it_again() -> None:
    known = host_history.add_evidence(host(), against(EvidenceType.REPLAY), [])
    known = host_history.add_pass(known, "000002", "passed", NOW + 10)
    assert known.state(NOW + 11) is SUSPECT
    known = host_history.add_evidence(known, against(EvidenceType.BURN_IN, NOW + 20), [])
    assert known.state(NOW + 21) is EXCLUDED


def test_one_failed_start_is_suspect_and_those_of_two_jobs_are_refused() -> None:
    known = host_history.add_evidence(host(), against(EvidenceType.START), [])
    assert known.state(NOW) is SUSPECT
    known = host_history.add_evidence(known, against(EvidenceType.START, NOW + 10), [])
    assert known.state(NOW + 10) is SUSPECT, "the same job twice may be the job's own fault"
    known = host_history.add_evidence(known, against(EvidenceType.START, NOW + 20, "000002"), [])
    assert known.state(NOW + 20) is EXCLUDED
    assert known.refused(NOW + 20)
    known = host_history.add_pass(known, "000003", "passed", NOW + 30)
    assert known.refused(NOW + 30), "a burn-in does not show that programs can start"


def test_failed_starts_of_two_jobs_on_different_days_are_no_pattern() -> None:
    known = host_history.add_evidence(host(), against(EvidenceType.START), [])
    known = host_history.add_evidence(
        known, against(EvidenceType.START, NOW + SUSPICION_SECONDS + 60, "000002"), []
    )
    assert known.state(NOW + SUSPICION_SECONDS + 60) is SUSPECT


def test_an_error_that_names_the_chip_needs_no_second_job() -> None:
    known = host_history.add_evidence(host(), against(EvidenceType.START, located=True), [])
    assert known.state(NOW) is EXCLUDED


def test_evidence_by_position_expires_soon_and_never_refuses_a_host() -> None:
    known = host(strength=Strength.POSITION)
    for job in ("000001", "000002", "000003"):
        known = host_history.add_evidence(known, against(EvidenceType.START, job=job), [])
    assert known.state(NOW) is EXCLUDED
    assert not known.refused(NOW)
    assert known.state(NOW + POSITION_SECONDS + 1) is GOOD


def test_a_manual_exclusion_lasts_until_the_host_is_forgiven() -> None:
    known = host_history.exclude(host(), "gives NaN", None, NOW)
    assert known.state(NOW + 100 * EXCLUSION_SECONDS) is EXCLUDED
    assert known.refused(NOW)
    assert known.reason(NOW) == "gives NaN"
    assert host_history.forgive(known).state(NOW) is GOOD
    assert host_history.exclude(known, "for a day", NOW + 60, NOW).state(NOW + 61) is GOOD


def test_many_bad_hosts_at_once_are_an_event_and_count_against_no_host() -> None:
    hosts = [host(number) for number in range(8)]
    for number in range(5):
        others = [*hosts[:number], *hosts[number + 1 :]]
        hosts[number] = host_history.add_evidence(
            hosts[number], against(EvidenceType.BURN_IN), others
        )
    states = [known.state(NOW) for known in hosts]
    assert states == [EXCLUDED] * 2 + [SUSPECT] * 3 + [GOOD] * 3
    message = host_history.mass_failure_message(hosts, NOW)
    assert "5 of 8 hosts went bad within a day, in us-central2-b" in message
    assert host_history.mass_failure_message(hosts, NOW + 2 * SUSPICION_SECONDS) == ""


def test_a_large_fleet_may_lose_a_fifth_before_it_is_an_event() -> None:
    hosts = [host(number) for number in range(50)]
    for number in range(10):
        others = [*hosts[:number], *hosts[number + 1 :]]
        hosts[number] = host_history.add_evidence(
            hosts[number], against(EvidenceType.BURN_IN), others
        )
    assert sum(known.state(NOW) is EXCLUDED for known in hosts) == 10
    assert not host_history.mass_failure_message(hosts, NOW)


def test_old_evidence_makes_room_for_new() -> None:
    known = host()
    for number in range(100):
        known = host_history.add_evidence(
            known, against(EvidenceType.START, NOW + number, f"{number:06}"), []
        )
    assert len(known.evidence) == host_history.MAX_EVIDENCE
    assert known.evidence[-1].job == "000099"
    assert replace(known, evidence=()).state(NOW) is GOOD


def test_steps_that_differ_again_after_a_burn_in_was_passed_refuse_the_host() -> None:
    known = host_history.add_evidence(host(), against(EvidenceType.REPLAY), [])
    known = host_history.add_pass(known, "000002", "passed", NOW + 10)
    assert not known.refused(NOW + 10)
    known = host_history.add_evidence(known, against(EvidenceType.REPLAY, NOW + 20), [])
    assert known.refused(NOW + 20)
    assert not known.refused(NOW + 20 + EXCLUSION_SECONDS)
    burnt = host_history.add_evidence(host(), against(EvidenceType.BURN_IN), [])
    burnt = host_history.add_evidence(
        host_history.add_pass(burnt, "2", "", NOW), against(EvidenceType.BURN_IN), []
    )
    assert not burnt.refused(NOW), "a burn-in does show it"


def test_evidence_after_the_clock_was_set_back_counts() -> None:
    known = host_history.add_evidence(host(), against(EvidenceType.BURN_IN), [])
    known = host_history.add_pass(known, "000002", "passed", NOW + 10)
    known = host_history.add_evidence(known, against(EvidenceType.BURN_IN, NOW - 3600), [])
    assert known.state(NOW - 3600) is EXCLUDED
    twice = host_history.add_evidence(host(), against(EvidenceType.START), [])
    twice = host_history.add_evidence(twice, against(EvidenceType.START, NOW - 3600, "000002"), [])
    assert twice.state(NOW - 3600) is EXCLUDED


def test_a_clock_that_was_ahead_excludes_no_host_for_longer() -> None:
    year = 365 * 24 * 3600.0
    known = host_history.add_evidence(host(), against(EvidenceType.BURN_IN, NOW + year), [])
    mended = host_history.clamp_times(known, NOW)
    assert mended.expires(NOW) == NOW + EXCLUSION_SECONDS
    assert mended.last_seen == NOW
    assert host_history.clamp_times(mended, NOW) is mended


def test_a_host_that_was_excluded_unseen_gets_its_place_when_it_is_met() -> None:
    unseen = host_history.unused_host(HostName("machine-0", Strength.MACHINE, "", ""), NOW)
    known = host_history.record_use(
        host_history.exclude(unseen, "no", None, NOW), host().name, "000001", NOW
    )
    assert (known.name.zone, known.times_seen, known.refused(NOW)) == ("us-central2-b", 1, True)


def test_manual_exclusions_are_never_displaced_nor_measurements_by_passes() -> None:
    known = host_history.exclude(host(), "gives NaN", None, NOW)
    for number in range(100):
        known = host_history.add_evidence(known, against(EvidenceType.START, NOW + number), [])
    assert known.refused(NOW + 100)
    assert len(known.evidence) == host_history.MAX_EVIDENCE
    measured = host_history.add_evidence(host(), against(EvidenceType.BURN_IN), [])
    for number in range(100):
        measured = host_history.add_pass(measured, "000002", "passed", NOW + number)
    assert measured.state(NOW + 100) is SUSPECT


def test_hosts_that_people_exclude_went_bad_by_no_event() -> None:
    hosts = [host(number) for number in range(8)]
    for number in range(3):
        others = [*hosts[:number], *hosts[number + 1 :]]
        hosts[number] = host_history.add_evidence(
            hosts[number], against(EvidenceType.BURN_IN), others
        )
    hosts[7] = host_history.exclude(hosts[7], "by hand", None, NOW)
    assert "3 of 8 hosts went bad" in host_history.mass_failure_message(hosts, NOW)
