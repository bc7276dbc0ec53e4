import time

import pytest

from drumline.cli.rendering.text import (
    Sanitizer,
    display_width,
    format_dollars,
    format_duration,
    format_short,
    format_time,
    parse_time,
    plural,
    sanitize,
    sanitize_lines,
    truncate,
)


@pytest.mark.parametrize(
    ("seconds", "written"),
    [
        (0, "0.0 s"),
        (-3, "0.0 s"),
        (1.234, "1.2 s"),
        (9.97, "10 s"),
        (48.2, "48 s"),
        (59.7, "1 min"),
        (125, "2 min 5 s"),
        (1199, "20 min"),
        (3599, "1 h"),
        (7800, "2 h 10 min"),
        (86399, "1 d"),
        (3 * 86400 + 4 * 3600, "3 d 4 h"),
    ],
)
def test_a_duration_in_its_two_largest_units(seconds: float, written: str) -> None:
    assert format_duration(seconds) == written


@pytest.mark.parametrize(
    ("amount", "written"),
    [(9.12, "$9.12"), (99.999, "$100"), (1234.5, "$1,234"), (0, "$0.00"), (0.001, "<$0.01")],
)
def test_dollars(amount: float, written: str) -> None:
    assert format_dollars(amount) == written


def test_counts_and_rates() -> None:
    assert [plural(n, "chip") for n in (0, 1, 1024)] == ["0 chips", "1 chip", "1,024 chips"]
    assert [format_short(n) for n in (9800, 412, 1.25e6)] == ["9.8k", "412", "1.25M"]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("plain", "plain"),
        ("größe 模型", "größe 模型"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("a\x9b2Jb\x00\x07\x7f", "ab"),
        ("two\nlines\tand\rmore", "two lines andmore"),
        ("\u202egnp.exe", "gnp.exe"),
        ("\x1b", ""),
        ("\x1b(0x", "x"),
    ],
)
def test_sanitized_text_has_no_control_characters(text: str, left: str) -> None:
    assert sanitize(text) == left


def test_wide_characters_take_two_columns() -> None:
    assert display_width("模型-a") == 6
    assert truncate("模型模型", 5) == "模型…"
    assert display_width(truncate("模型模型", 4)) <= 4
    assert truncate("llama-1b-long", 8) == "llama-1…"
    assert truncate("llama", 5) == "llama"


def test_times_have_a_date_unless_they_are_today(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    now = 1_700_000_000.0  # 14 Nov 2023, 22:13:20
    assert format_time(now - 3600, now) == "21:13"
    assert format_time(now - 3600, now, seconds=True) == "21:13:20"
    assert format_time(now - 86400, now) == "13 Nov 22:13"


CLIPBOARD = b"\x1b]52;c;cm0gLXJmIH4=\x07"

STREAMS = [
    (b"plain\ttext\n", "plain\ttext\n"),
    (b"\x1b[31mred\x1b[0m\n", "red\n"),
    (b"a" + CLIPBOARD + b"b\n", "ab\n"),
    (b"\x1b]0;title\x1b\\after\n", "after\n"),
    (b"\x1b]never closed\nthe next line\n", "never closed\nthe next line\n"),
    (b"\x1bPq#0\x1b\\sixel\n", "sixel\n"),
    ("größe 模型\n".encode(), "größe 模型\n"),
    (b"\xff\xfe bad bytes\n", "\ufffd\ufffd bad bytes\n"),
    (b"10%\r20%\r\n30%\n", "10%\n20%\n30%\n"),
    ("\x9b2J\x85\u202egnp.exe\n".encode(), "gnp.exe\n"),
    (b"cut off \x1b]52;c;", "cut off 52;c;"),
    (b"a\x08\x08b\x07\x00\n", "ab\n"),
]


@pytest.mark.parametrize(("sent", "shown"), STREAMS)
def test_a_stream_is_sanitized_for_any_chunks(sent: bytes, shown: str) -> None:
    assert sanitize_lines(sent.decode("utf-8", "replace")) == shown
    for size in (1, 2, 3, 1000):
        stream = Sanitizer()
        pieces = [sent[start : start + size] for start in range(0, len(sent), size)]
        text = "".join(stream.feed(piece) for piece in pieces) + stream.feed(b"", last=True)
        assert text == shown


def test_an_unclosed_escape_sequence_does_not_hide_the_log() -> None:
    stream = Sanitizer()
    shown = stream.feed(b"\x1b]") + "".join(stream.feed(b"x" * 1000) for _ in range(10))
    assert len(shown) >= 5000
    assert "\x1b" not in shown


def test_times_are_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    noon = 1_700_049_600.0  # 2023-11-15 12:00
    assert parse_time("10m", noon) == noon - 600
    assert parse_time("1.5h", noon) == noon - 5400
    assert parse_time("11:30", noon) == noon - 1800
    assert parse_time("12:30", noon) == noon + 1800 - 86400
    assert parse_time("2023-11-15T11:00", noon) == noon - 3600
    for text in ("", "ten", "10", "25:99", "yesterday"):
        with pytest.raises(ValueError, match=r"[Ii]nvalid|must be|range|format"):
            parse_time(text, noon)
