"""The records of a batch, and the data sources."""

# mypy: allow-untyped-calls

import re
from pathlib import Path

import grain  # type: ignore[import-untyped]
import numpy as np
import pytest
from array_record.python import array_record_module  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.errors import UserError
from drumline.train import data
from drumline.train.data import shuffled


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 5))
def test_an_epoch_has_every_record_once(count: int, seed: int, epoch: int) -> None:
    order = shuffled(np.arange(count), count, (seed, epoch))
    assert sorted(order) == list(range(count))


def test_every_epoch_and_seed_has_a_different_random_order() -> None:
    count = 20_000
    orders = [shuffled(np.arange(count), count, key) for key in ((0, 0), (0, 1), (1, 0))]
    orders.append(np.arange(count))
    for index, order in enumerate(orders):
        for other_order in orders[:index]:
            assert np.sum(order == other_order) < 10  # one is expected
            assert abs(np.corrcoef(order, other_order)[0, 1]) < 0.04  # 5.6 standard deviations
    steps = np.diff(orders[0])
    assert len(np.unique(steps)) > 10_000


def test_the_order_of_a_huge_data_set_is_not_stored() -> None:
    count = 10**12
    first = shuffled(np.arange(1000), count, (3,))
    assert len(np.unique(first)) == 1000
    assert first.min() >= 0
    assert first.max() < count
    assert first.max() > count // 2


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(5, 300),
    position=st.integers(0, 100),
    hosts=st.sampled_from([1, 2, 4, 8]),
    shuffle=st.booleans(),
)
def test_a_batch_does_not_depend_on_the_number_of_hosts(
    count: int, position: int, hosts: int, shuffle: bool
) -> None:
    source = data.arrays({"n": np.arange(count)}, batch=16, seed=5, shuffle=shuffle)
    all_numbers = source.numbers(16 * position, np.arange(16))
    shares = np.split(np.arange(16), hosts)
    assert np.array_equal(
        np.concatenate([source.numbers(16 * position, s) for s in shares]), all_numbers
    )


def test_an_epoch_may_end_within_a_batch() -> None:
    source = data.arrays({"n": np.arange(10)}, batch=4, seed=1)
    records = np.concatenate([source.numbers(4 * i, np.arange(4)) for i in range(10)])
    assert sorted(records[:10]) == sorted(records[10:20]) == list(range(10))
    assert list(records[:10]) != list(records[10:20])


def test_windows_of_a_token_file_share_their_ends(tmp_path: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 50_000, 1000).astype(np.uint16)
    ids.tofile(tmp_path / "ids.bin")
    source = data.tokens(tmp_path / "ids.bin", length=16, batch=4, shuffle=False)
    assert len(source.records) == 62
    window = source.records.rows(np.array([0, 61]))["tokens"]
    assert window.dtype == np.int32
    assert np.array_equal(window[0], ids[:17])
    assert np.array_equal(window[1], ids[61 * 16 : 62 * 16 + 1])


def test_array_records_and_grain_datasets_are_read_by_index(tmp_path: Path) -> None:
    file = str(tmp_path / "a.array_record")
    writer = array_record_module.ArrayRecordWriter(file, "group_size:1")
    for number in range(30):
        writer.write(np.array([number, -number], np.float32).tobytes())
    writer.close()
    parsed = data.array_records(
        file, lambda payload: {"x": np.frombuffer(payload, np.float32)}, batch=8
    )
    assert np.array_equal(parsed.records.rows(np.array([29, 3]))["x"], [[29, -29], [3, -3]])
    doubled = grain.MapDataset.range(30).map(lambda n: {"x": np.float32(2 * n)})
    rows = data.records(doubled, batch=8).records.rows(np.array([7, 0]))
    assert np.array_equal(rows["x"], [14, 0])


def test_synthetic_records_are_reproducible_and_different() -> None:
    source = data.synthetic(lambda random: {"x": random.normal(size=3)}, batch=4, seed=2)
    rows = source.records.rows(np.array([5, 6, 5]))["x"]
    assert np.array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])


def test_invalid_data_is_rejected_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "short.bin").write_bytes(bytes(20))
    (tmp_path / "bad.array_record").write_bytes(b"no records" * 20)
    invalid = {
        "does not exist": lambda: data.tokens(tmp_path / "none.bin", length=4, batch=1),
        "not a whole number of uint16": lambda: data.tokens(
            tmp_path / "odd.bin", length=4, batch=1
        ),
        "too few for a window of 16": lambda: data.tokens(
            tmp_path / "short.bin", length=16, batch=1
        ),
        "use uint16 or uint32": lambda: data.tokens(
            tmp_path / "short.bin", length=4, batch=1, dtype="int8"
        ),
        "x has 3, y has 4": lambda: data.arrays({"x": np.zeros(3), "y": np.zeros(4)}, batch=1),
        "a batch of 0 rows is empty": lambda: data.arrays({"x": np.zeros(3)}, batch=0),
        "cannot be read as ArrayRecord": lambda: data.array_records(
            str(tmp_path / "bad.array_record"), lambda payload: {"x": payload}, batch=1
        ),
    }
    for message, make in invalid.items():
        with pytest.raises(UserError, match=re.escape(message)) as raised:
            make()
        assert "\n" not in str(raised.value)
