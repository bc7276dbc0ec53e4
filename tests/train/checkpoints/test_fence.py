"""The fence allows one writer at a time, and a late writer stops without touching others' files."""

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.errors import UserError
from drumline.train.checkpoints.claim import BucketRecords, DiskRecords
from drumline.train.checkpoints.fence import (
    Claim,
    ClaimRecords,
    Fence,
    FencedOff,
    Writer,
    claim_folder,
    newest,
    refusal,
)
from tests.train.checkpoints.fences import MemoryRecords, fence_of

JOB = Writer("a", owner="aaaa", job="000001", attempt=1, fence=7, machine="host-1", process=10)
BY_HAND = Writer("hand", machine="desk", process=11)


@pytest.fixture(params=["memory", "disk", "bucket"])
def records(request: pytest.FixtureRequest, tmp_path: Path) -> ClaimRecords:
    match request.param:
        case "memory":
            return MemoryRecords()
        case "disk":
            return DiskRecords(str(tmp_path))
        case _:
            return BucketRecords(request.getfixturevalue("bucket") + "/team/run")


def claim_with(records: ClaimRecords, writer: Writer, complete: tuple[str, ...] = ()) -> Fence:
    return claim_folder("run", records, writer, is_complete=lambda name: name in complete)


@pytest.mark.parametrize(
    ("holder", "released", "writer", "is_over", "reason"),
    [
        (JOB, False, replace(JOB, id="b", fence=8), False, ""),
        (JOB, False, replace(JOB, id="b", job="000009", fence=8, assigned=True), False, ""),
        (JOB, False, replace(JOB, id="b", job="000009", fence=8), False, "it is claimed by"),
        (JOB, True, replace(JOB, id="b", job="000009", fence=8), False, ""),
        (JOB, False, replace(JOB, id="b"), False, ""),  # the same attempt runs two programs
        (JOB, True, replace(JOB, id="b", fence=6), True, "a later attempt"),
        (JOB, True, replace(JOB, id="b", owner="bbbb", fence=99), True, "of another home"),
        (JOB, False, BY_HAND, False, "it is claimed by attempt 1 of job 000001"),
        (JOB, True, BY_HAND, False, ""),
        (JOB, False, BY_HAND, True, ""),
        (BY_HAND, False, JOB, False, ""),
        (BY_HAND, False, replace(BY_HAND, id="b"), False, ""),
    ],
)
def test_who_may_claim_a_folder(
    holder: Writer, released: bool, writer: Writer, is_over: bool, reason: str
) -> None:
    reason_text = refusal(Claim(5, 5, holder, released=released), writer, is_over=is_over)
    assert reason_text.startswith(reason) if reason and reason[0] == "i" else reason in reason_text
    assert bool(reason_text) == bool(reason)


def test_a_replaced_writer_is_stopped_at_its_next_announcement(
    records: ClaimRecords,
) -> None:
    replaced_fence = claim_with(records, JOB)
    replaced_fence.begin_write("10")
    replaced_fence.begin_removal([])
    current_fence = claim_with(records, replace(JOB, id="b", attempt=2, fence=8))
    takeover_message = r"attempt 2 of job 000001 .* has taken over run"
    with pytest.raises(FencedOff, match=takeover_message):
        replaced_fence.begin_write("20")
    with pytest.raises(FencedOff, match=takeover_message):
        replaced_fence.begin_removal(["10"])
    with pytest.raises(FencedOff, match=takeover_message):
        replaced_fence.check()
    replaced_fence.release()
    current_fence.begin_write("20")
    current_fence.check()


def test_names_of_unfinished_writes_and_removals_are_never_reused(
    records: ClaimRecords,
) -> None:
    replaced_fence = claim_with(records, JOB)
    replaced_fence.begin_removal(["10"])
    replaced_fence.begin_write("30", removing=["5"])
    current_fence = claim_with(records, replace(JOB, id="b", fence=8))
    assert set(current_fence.abandoned) == {"30", "5"}
    current_fence.begin_removal(["20"])
    third_fence = claim_with(records, replace(JOB, id="c", fence=9))
    assert set(third_fence.abandoned) == {"30", "5", "20"}
    assert replaced_fence.may_remove_own("30")
    assert not replaced_fence.may_remove_own("40")


def test_a_complete_checkpoint_stays_after_a_takeover(records: ClaimRecords) -> None:
    replaced_fence = claim_with(records, JOB)
    replaced_fence.begin_write("30")
    current_fence = claim_with(records, replace(JOB, id="b", fence=8), complete=("30",))
    assert current_fence.abandoned == ()
    assert not replaced_fence.may_remove_own("30")


def test_a_late_start_of_an_old_attempt_is_refused(records: ClaimRecords) -> None:
    claim_with(records, JOB).release()
    with pytest.raises(
        UserError, match=r"a later attempt has claimed it .* remove run/drumline/cl"
    ):
        claim_with(records, replace(JOB, id="late", fence=6))
    claim = newest(records)
    assert claim is not None
    assert claim.writer == JOB


def test_removing_the_claims_by_hand_stops_their_holder(tmp_path: Path) -> None:
    records = DiskRecords(str(tmp_path))
    replaced_fence = claim_with(records, JOB)
    for _ in range(5):
        replaced_fence.begin_write("10")
    for number in records.numbers():
        records.remove(number)
    current_fence = claim_with(records, replace(JOB, id="b", owner="bbbb"))
    with pytest.raises(FencedOff):
        replaced_fence.begin_write("20")
    current_fence.begin_write("20")


def test_a_number_used_and_removed_by_the_holder_is_not_a_claim(tmp_path: Path) -> None:
    """The holder renews its claim between the read of its claim and the creation of the next."""
    records = DiskRecords(str(tmp_path))
    replaced_fence = claim_with(records, JOB)
    original_create = records.create

    def create(number: int, record: dict[str, Any]) -> bool:
        records.create = original_create  # type: ignore[method-assign]
        for step in ("1", "2", "3"):
            replaced_fence.begin_write(step)
        return original_create(number, record)

    records.create = create  # type: ignore[method-assign]
    current_fence = claim_with(records, replace(JOB, id="b", fence=8))
    current_fence.check()
    assert current_fence.number == max(records.numbers()) == 5
    with pytest.raises(FencedOff):
        replaced_fence.begin_write("4")


def test_claims_with_the_same_number_after_a_removal_are_different(tmp_path: Path) -> None:
    records = DiskRecords(str(tmp_path))
    replaced_fence = claim_with(records, JOB)
    replaced_fence.begin_write("10")
    for number in records.numbers():
        records.remove(number)
    claim_with(records, BY_HAND).begin_write("20")
    with pytest.raises(FencedOff):
        replaced_fence.begin_write("30")


def test_the_chain_stays_short_and_its_numbers_grow(records: ClaimRecords) -> None:
    fences = []
    for fence in range(1, 6):
        fences.append(claim_with(records, replace(JOB, id=str(fence), fence=fence)))
        for step in range(10):
            fences[-1].begin_write(str(step))
            fences[-1].begin_removal([])
    numbers = [fence.number for fence in fences]
    assert numbers == sorted(set(numbers))
    assert len(records.numbers()) == 6


def test_a_claim_with_a_lost_response_is_valid(bucket: str) -> None:
    """The client repeats a call without a response, and the object already exists."""
    records = BucketRecords(bucket)
    fence = claim_with(records, JOB)
    record = records.read(fence.number)
    assert record is not None
    assert records.create(fence.number, record)
    other = {**record, "writer": {**record["writer"], "id": "b"}}
    assert not records.create(fence.number, other)


def test_a_missing_bucket_is_an_error_with_the_message_of_the_cloud(bucket: str) -> None:
    with pytest.raises(OSError, match="bucket"):
        claim_with(BucketRecords(f"{bucket}-typo/run"), JOB)


def test_an_unreadable_claim_is_an_error_and_not_a_free_folder(tmp_path: Path) -> None:
    records = DiskRecords(str(tmp_path))
    claim_with(records, JOB)
    (tmp_path / "drumline" / "claims" / "1.json").write_text("{")
    with pytest.raises(OSError, match="cannot be read"):
        claim_with(records, replace(JOB, id="b", fence=8))


def test_one_of_several_simultaneous_writers_succeeds(tmp_path: Path) -> None:
    started = threading.Barrier(8)
    holders: list[str] = []

    def write_checkpoints(name: str) -> None:
        started.wait()
        fence = claim_with(DiskRecords(str(tmp_path)), Writer(name))
        try:
            for step in range(20):
                fence.begin_write(str(step))
            holders.append(name)
        except FencedOff:
            pass

    threads = [threading.Thread(target=write_checkpoints, args=(str(n),)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    claim = newest(DiskRecords(str(tmp_path)))
    assert claim is not None
    assert claim.writer.id in holders


@given(seed=st.integers(0, 2**32))
def test_no_two_writers_ever_use_one_name(seed: int) -> None:
    """Run writers with their steps in any order and with any delay between them."""
    random_source = random.Random(seed)
    records = MemoryRecords()
    complete: set[str] = set()
    writers: list[Model] = []
    for step in range(60):
        if not writers or random_source.random() < 0.1:
            writer = replace(JOB, id=f"w{step}", fence=len(writers))
            fence = fence_of(writer, records, complete.__contains__)
            writers.append(Model(fence, complete))
        random_source.choice(writers).advance(random_source)
    touched = [(name, id(model)) for model in writers for name in model.touched]
    names = {name for name, _ in touched}
    assert all(len({writer_id for n, writer_id in touched if n == name}) == 1 for name in names)


class Model:
    """A program that announces each checkpoint and writes it some time later."""

    def __init__(self, fence: Fence, complete: set[str]) -> None:
        self.fence, self.complete = fence, complete
        self.touched: set[str] = set()
        self._writing = ""
        self._step = 0
        self._stopped = False

    def advance(self, random_source: random.Random) -> None:
        """Announce a checkpoint, write a part of it, or finish it. An announced checkpoint is
        always written.
        """
        if self._writing:
            if self._writing not in self.complete:
                self.touched.add(self._writing)
            if random_source.random() < 0.4:
                self._finish()
            return
        if self._stopped:
            return
        self._step += 10
        name = str(self._step)
        if name in self.fence.abandoned or name in self.complete:
            name = f"{name}.{self.fence.number}"
        try:
            self.fence.begin_write(name)
        except FencedOff:
            self._stopped = True
        else:
            self._writing = name

    def _finish(self) -> None:
        name, self._writing = self._writing, ""
        try:
            self.fence.begin_removal([])
        except FencedOff:
            self._stopped = True
            if not self.fence.may_remove_own(name):
                self.complete.add(name)
        else:
            self.complete.add(name)
