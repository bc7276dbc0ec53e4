"""The arithmetic of time against counting it, microsecond by microsecond."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.inspect.profiles.intervals import (
    Intervals,
    IntervalUnion,
    self_intervals,
    uncovered_time,
)

LONG = 40
WHILE = 0

stretches = st.lists(
    st.tuples(st.integers(0, LONG), st.integers(0, LONG)).map(lambda pair: tuple(sorted(pair))),
    max_size=8,
)


def axis_ticks(pairs: list[tuple[int, int]]) -> set[int]:
    return {tick for start, end in pairs for tick in range(start, end)}


def made(pairs: list[tuple[int, int]]) -> Intervals:
    return Intervals.from_rows([(float(start), float(end), 0) for start, end in pairs])


def cover(pairs: list[tuple[int, int]]) -> IntervalUnion:
    made_of = made(pairs)
    return IntervalUnion(made_of.starts, made_of.ends)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(stretches, stretches)
def test_a_cover_is_what_counting_says(
    first: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    covered = cover(first)
    assert covered.length == len(axis_ticks(first))
    queried = made(other)
    results = covered.overlap(queried.starts, queried.ends)
    assert results.tolist() == [len(axis_ticks(first) & axis_ticks([pair])) for pair in other]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(stretches, stretches)
def test_exposed_parts_add_up_to_what_nothing_hides(
    running: list[tuple[int, int]], computing: list[tuple[int, int]]
) -> None:
    results = uncovered_time(made(running), cover(computing))
    assert results.sum() == len(axis_ticks(running) - axis_ticks(computing))
    assert (results >= 0).all()


@st.composite
def nests(
    draw: st.DrawFn, start: int = 0, end: int = 1000, depth: int = 3
) -> list[tuple[int, int, int]]:
    """Events that enclose others, as a loop does its body; operation 0 is the loop."""
    rows = []
    at = start
    while at + 20 < end and draw(st.booleans()):
        begin = draw(st.integers(at, end - 20))
        until = draw(st.integers(begin + 10, end))
        inner = draw(nests(begin, until, depth - 1)) if depth else []
        rows += [(begin, until, WHILE if inner else draw(st.integers(1, 3))), *inner]
        at = until + 5
    return rows


@settings(max_examples=200, deadline=None, derandomize=True)
@given(nests())
def test_loops_are_not_counted_beside_their_bodies(rows: list[tuple[int, int, int]]) -> None:
    events = Intervals.from_rows([(float(a), float(b), operation) for a, b, operation in rows])
    own = self_intervals(events, {WHILE})
    leaves = [(a, b, operation) for a, b, operation in rows if operation != WHILE]
    assert sorted(zip(own.starts, own.ends, own.operations, strict=True)) == sorted(leaves)


def test_what_encloses_by_computing_keeps_the_rest_of_its_time() -> None:
    events = Intervals.from_rows(
        [(0.0, 100.0, 1), (20.0, 30.0, 2), (50.0, 80.0, 3), (60.0, 70.0, 2)]
    )
    assert self_intervals(events, {WHILE}).operation_times(4).tolist() == [0, 60, 20, 20]


def test_a_loop_of_which_nothing_inside_was_traced_counts_whole() -> None:
    events = Intervals.from_rows([(0.0, 100.0, WHILE), (100.0, 130.0, 1)])
    assert self_intervals(events, {WHILE}).operation_times(2).tolist() == [100, 30]


def test_kernels_that_overlap_on_a_stream_stand_beside_each_other() -> None:
    events = Intervals.from_rows([(0.0, 50.0, 1), (46.0, 60.0, 2), (60.0, 70.0, 1)])
    own = self_intervals(events, {WHILE})
    assert own.operation_times(3).tolist() == [0, 60, 14]
    assert IntervalUnion(own.starts, own.ends).length == 70


def test_an_inner_event_may_end_a_nanosecond_late() -> None:
    events = Intervals.from_rows([(0.0, 100.0, 1), (50.0, 101.0, 2), (100.0, 120.0, 3)])
    assert self_intervals(events, {WHILE}).operation_times(4).tolist() == [0, 50, 50, 20]


def test_nothing_has_no_length() -> None:
    nothing = Intervals.from_rows([])
    assert self_intervals(nothing, set()).operation_times(2).tolist() == [0, 0]
    assert IntervalUnion(nothing.starts, nothing.ends).length == 0
    assert uncovered_time(nothing, IntervalUnion(nothing.starts, nothing.ends)).size == 0
    assert np.size(Intervals.concatenate([]).starts) == 0
