import time

import pytest

from drumline.cli.text import clock, count, cut, dollars, duration, harmless, short, width


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
    assert duration(seconds) == written


@pytest.mark.parametrize(
    ("amount", "written"), [(9.12, "$9.12"), (99.999, "$100"), (1234.5, "$1,234"), (0, "$0.00")]
)
def test_dollars(amount: float, written: str) -> None:
    assert dollars(amount) == written


def test_counts_and_rates() -> None:
    assert [count(n, "chip") for n in (0, 1, 1024)] == ["0 chips", "1 chip", "1,024 chips"]
    assert [short(n) for n in (9800, 412, 1.25e6)] == ["9.8k", "412", "1.25M"]


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
def test_nothing_a_terminal_acts_on_is_left(text: str, left: str) -> None:
    assert harmless(text) == left


def test_wide_characters_are_counted_and_cut_as_they_are_drawn() -> None:
    assert width("模型-a") == 6
    assert cut("模型模型", 5) == "模型…"
    assert width(cut("模型模型", 4)) <= 4
    assert cut("llama-1b-long", 8) == "llama-1…"
    assert cut("llama", 5) == "llama"


def test_the_clock_names_the_day_only_when_it_is_not_today(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    now = 1_700_000_000.0  # 14 Nov 2023, 22:13:20
    assert clock(now - 3600, now) == "21:13"
    assert clock(now - 3600, now, seconds=True) == "21:13:20"
    assert clock(now - 86400, now) == "13 Nov 22:13"
