"""The supervisor's host history: on a full disk, after clock jumps, with ten thousand hosts."""

import sqlite3
import time
from pathlib import Path

import pytest

from drumline.jobs.controller.host_history import HostHistory
from drumline.jobs.core.host_history import EvidenceType, HostState
from drumline.jobs.core.reasons import EndReason
from drumline.jobs.core.state import Cause, Placement
from drumline.jobs.store.records import Store

HELD = Placement("dl-me-000001-1", "us-central2-b", "v4-16", hosts=2, asked_at=0.0)
LIES = Cause(
    EndReason.BAD_HOST, 1, 2, "chip 5 of host 1 computes wrong: x", proof=EvidenceType.BURN_IN
)
NOW = 1_800_000_000.0


def memory_of(store: Store, now: float = NOW) -> HostHistory:
    return HostHistory(store.hosts, lambda: now)


def test_a_full_disk_ends_no_job_and_the_evidence_is_saved_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "jobs.db")
    memory = memory_of(store)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as disk:
        disk.setattr(store.hosts, "save", full)
        assert memory.record_use(1, {"physical_host": "m-1"}, HELD, "000001").refusal == ""
        memory.record_failure(LIES, {"physical_host": "m-1"}, HELD, "000001", 1)
        with pytest.raises(sqlite3.OperationalError):
            memory.exclude("m-2", "by hand", None)
        assert memory.find("m-2") is None, "who was told that it failed need not undo it"
    assert memory_of(store).all() == []
    memory.save_unsaved()
    (known,) = memory_of(store).all()
    assert known.state(NOW) is HostState.EXCLUDED


def test_entries_of_a_clock_ahead_count_as_of_now(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.db")
    memory_of(store, NOW + 1e8).record_failure(LIES, {"physical_host": "m-1"}, HELD, "000001", 1)
    (known,) = memory_of(store).all()
    assert known.last_seen == NOW


def located(host: int, text: str = "Failed to initialize TPU system") -> Cause:
    """Return a failed start with the location of the chip in libtpu's own log."""
    return Cause(EndReason.BAD_HOST, host, 2, text, proof=EvidenceType.START, location="tpu3:pe2:2")


def test_a_location_in_libtpus_log_excludes_the_machine(tmp_path: Path) -> None:
    memory = memory_of(Store(tmp_path / "jobs.db"))
    memory.record_failure(located(0), {"physical_host": "m-1"}, HELD, "000001", 1)
    assert [host.state(NOW) for host in memory.all()] == [HostState.EXCLUDED]


def test_a_location_that_several_machines_claim_is_withdrawn(tmp_path: Path) -> None:
    memory = memory_of(Store(tmp_path / "jobs.db"))
    for number in range(3):
        identity = {"physical_host": f"m-{number}"}
        memory.record_failure(located(0), identity, HELD, f"00000{number}", 1)
        states = {host.name.identity: host.state(NOW) for host in memory.all()}
        if number:
            assert set(states.values()) == {HostState.SUSPECT}, states


def test_a_location_counts_again_and_again_on_the_machine_that_has_it(tmp_path: Path) -> None:
    memory = memory_of(Store(tmp_path / "jobs.db"))
    for job in ("000001", "000002"):
        memory.record_failure(located(0), {}, HELD, job, 1)
    states = {host.name.identity: host.state(NOW) for host in memory.all()}
    assert states == {
        "tpu3:pe2:2": HostState.EXCLUDED,
        "us-central2-b/v4-16/0": HostState.EXCLUDED,
    }
    memory.record_failure(located(1), {}, HELD, "000003", 1)
    states = {host.name.identity: host.state(NOW) for host in memory.all()}
    assert states["tpu3:pe2:2"] is HostState.GOOD


def test_words_of_a_program_name_no_location(tmp_path: Path) -> None:
    memory = memory_of(Store(tmp_path / "jobs.db"))
    tail = ("Physical location: rack7",)
    cause = Cause(EndReason.BAD_HOST, 0, 2, tail[0], tail, proof=EvidenceType.START, claimed=True)
    for number in range(2):
        memory.record_failure(cause, {"physical_host": f"m-{number}"}, HELD, "000001", number)
    assert {host.name.identity for host in memory.all()} == {"m-0", "m-1"}
    assert {host.state(NOW) for host in memory.all()} == {HostState.SUSPECT}


def test_ten_thousand_hosts_are_judged_within_a_moment(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.db")
    memory = memory_of(store)
    store.hosts._db.execute("BEGIN")
    for number in range(10_000):
        memory.record_use(1, {"physical_host": f"m-{number}"}, HELD, "000001")
    began = time.process_time()
    for number in range(10):
        memory.record_failure(LIES, {"physical_host": f"m-{number}"}, HELD, "000001", 1)
    store.hosts._db.execute("COMMIT")
    assert memory.mass_failure_message() == ""
    memory.record_use(1, {"physical_host": "m-5"}, HELD, "000002")
    memory.record_failure(LIES, {"physical_host": "m-5"}, HELD, "000002", 1)
    assert len(memory.all()) == 10_000
    assert time.process_time() - began < 2.0
