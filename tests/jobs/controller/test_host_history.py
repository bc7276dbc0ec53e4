"""The memory of hosts as the supervisor keeps it: on a full disk, after clocks, of ten thousand."""

import sqlite3
import time
from pathlib import Path

import pytest

from drumline.jobs.controller.host_history import HostHistory
from drumline.jobs.core.host_history import EvidenceKind, HostState
from drumline.jobs.core.state import Cause, Placement
from drumline.jobs.store.records import Store

HELD = Placement("dl-me-000001-1", "us-central2-b", "v4-16", hosts=2, asked_at=0.0)
LIES = Cause("bad host", 1, 2, "chip 5 of host 1 computes wrong: x", proof=EvidenceKind.BURN_IN)
NOW = 1_800_000_000.0


def memory_of(store: Store, now: float = NOW) -> HostHistory:
    return HostHistory(store.hosts, lambda: now)


def test_a_full_disk_ends_no_job_and_what_was_learnt_is_written_later(
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


def test_what_a_clock_ahead_wrote_is_read_as_of_now(tmp_path: Path) -> None:
    store = Store(tmp_path / "jobs.db")
    memory_of(store, NOW + 1e8).record_failure(LIES, {"physical_host": "m-1"}, HELD, "000001", 1)
    (known,) = memory_of(store).all()
    assert known.last_seen == NOW


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
