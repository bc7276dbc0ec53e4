"""The local copy of a log: its first and last part, with timestamps."""

import random
from pathlib import Path

import pytest

from drumline.hosts.log_segments import (
    MIN_LIMIT,
    LogWriter,
    TimestampReader,
    offset_at_time,
    read_chunk,
    received_size,
    rename_log,
    segments,
)


def kept(path: Path) -> bytes:
    return b"".join(part.path.read_bytes() for part in segments(path))


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix != ".times")


def test_a_log_within_its_limit_is_one_plain_file(tmp_path: Path) -> None:
    path = tmp_path / "host-0.log"
    log = LogWriter(path, MIN_LIMIT)
    log.append(b"one\n", 1.0)
    log.append(b"two\n", 2.0)
    log.close()
    assert path.read_bytes() == b"one\ntwo\n"
    assert received_size(path) == 8


@pytest.mark.parametrize("pieces", [100, 50_000])
def test_over_its_limit_a_log_keeps_its_head_and_its_newest_end(
    tmp_path: Path, pieces: int
) -> None:
    path, limit = tmp_path / "host-0.log", MIN_LIMIT
    text = random.Random(0).randbytes(10 * limit)
    log = LogWriter(path, limit)
    for start in range(0, len(text), pieces):
        log.append(text[start : start + pieces], float(start))
        assert on_disk(tmp_path) <= limit
    log.close()
    head, *tail = segments(path)
    assert head.path.read_bytes() == text[: limit // 2]
    newest = b"".join(part.path.read_bytes() for part in tail)
    assert len(newest) >= limit // 2 - limit // 16
    assert text.endswith(newest)
    assert received_size(path) == len(text)


def test_after_a_crash_the_log_continues_at_its_end(tmp_path: Path) -> None:
    path, text = tmp_path / "host-0.log", random.Random(1).randbytes(3 * MIN_LIMIT)
    for start in range(0, len(text), 7000):
        log = LogWriter(path, MIN_LIMIT)
        assert log.size == start
        log.append(text[start : start + 7000], 1.0)
        log.close()
    assert received_size(path) == len(text)
    assert text.endswith(b"".join(part.path.read_bytes() for part in segments(path)[1:]))


def test_reading_continues_after_a_gap(tmp_path: Path) -> None:
    path, text = tmp_path / "host-0.log", random.Random(2).randbytes(4 * MIN_LIMIT)
    log = LogWriter(path, MIN_LIMIT)
    log.append(text, 1.0)
    log.close()
    assert read_chunk(path, 10, 5).data == text[10:15]
    behind = read_chunk(path, MIN_LIMIT, 100)
    assert behind.start > MIN_LIMIT
    assert behind.data == text[behind.start : behind.start + 100]
    assert read_chunk(path, len(text), 100).segment is None


def test_every_offset_in_a_log_has_a_time(tmp_path: Path) -> None:
    path = tmp_path / "host-0.log"
    log = LogWriter(path)
    log.append(b"a" * 100, 10.0)
    log.append(b"b" * 100, 20.0)
    log.append(b".", 20.1)
    log.append(b"c" * 100, 20.15)
    log.close()
    times = TimestampReader(segments(path)[0])
    read = [times.time_at(offset) for offset in (0, 99, 100, 199, 201)]
    assert read == [10.0, 10.0, 20.0, 20.0, 20.1]
    assert offset_at_time(path, 15.0) == 100
    assert offset_at_time(path, 30.0) == 301


def test_times_of_a_growing_log_are_read_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "host-0.log"
    log = LogWriter(path)
    log.append(b"a" * 100, 10.0)
    times = TimestampReader(segments(path)[0])
    assert times.time_at(50) == 10.0
    log.append(b"b" * 100, 20.0)
    log.append(b"c" * 100, 30.0)
    log.close()
    assert [times.time_at(place) for place in (99, 150, 250)] == [10.0, 20.0, 30.0]


def test_times_take_at_most_a_quarter_of_the_text_or_five_per_second(tmp_path: Path) -> None:
    path = tmp_path / "host-0.log"
    log = LogWriter(path)
    for dot in range(10_000):
        log.append(b".", dot / 100)
    log.close()
    assert segments(path)[0].times.stat().st_size <= 10_000 / 4 + 5 * 100 * 16 + 16


def test_a_renamed_log_makes_way_for_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "host-0.log"
    for text in (b"first", b"second"):
        log = LogWriter(path, MIN_LIMIT)
        log.append(text + b"x" * MIN_LIMIT, 1.0)
        log.close()
        rename_log(path)
    assert received_size(path) == 0
    assert kept(tmp_path / "host-0.log.1").startswith(b"first")
    assert kept(tmp_path / "host-0.log.2").startswith(b"second")
