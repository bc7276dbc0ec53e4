"""Interval arithmetic agrees with counting microsecond by microsecond."""

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

interval_pairs = st.lists(
    st.tuples(st.integers(0, LONG), st.integers(0, LONG)).map(lambda pair: tuple(sorted(pair))),
    max_size=8,
)


def ticks(pairs: list[tuple[int, int]]) -> set[int]:
    return {tick for start, end in pairs for tick in range(start, end)}


def intervals_of(pairs: list[tuple[int, int]]) -> Intervals:
    return Intervals.from_rows([(float(start), float(end), 0) for start, end in pairs])


def union_of(pairs: list[tuple[int, int]]) -> IntervalUnion:
    intervals = intervals_of(pairs)
    return IntervalUnion(intervals.starts, intervals.ends)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(interval_pairs, interval_pairs)
def test_the_union_of_intervals_agrees_with_counting(
    first: list[tuple[int, int]], other: list[tuple[int, int]]
) -> None:
    covered = union_of(first)
    assert covered.length == len(ticks(first))
    queries = intervals_of(other)
    results = covered.overlap(queries.starts, queries.ends)
    assert results.tolist() == [len(ticks(first) & ticks([pair])) for pair in other]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(interval_pairs, interval_pairs)
def test_uncovered_times_add_up_to_the_time_outside_the_union(
    running: list[tuple[int, int]], computing: list[tuple[int, int]]
) -> None:
    results = uncovered_time(intervals_of(running), union_of(computing))
    assert results.sum() == len(ticks(running) - ticks(computing))
    assert (results >= 0).all()


@st.composite
def nests(
    draw: st.DrawFn, start: int = 0, end: int = 1000, depth: int = 3
) -> list[tuple[int, int, int]]:
    """Return events that enclose others, like a loop with its body. Operation 0 is the loop."""
    rows = []
    position = start
    while position + 20 < end and draw(st.booleans()):
        start_of_event = draw(st.integers(position, end - 20))
        end_of_event = draw(st.integers(start_of_event + 10, end))
        inner = draw(nests(start_of_event, end_of_event, depth - 1)) if depth else []
        rows += [
            (start_of_event, end_of_event, WHILE if inner else draw(st.integers(1, 3))),
            *inner,
        ]
        position = end_of_event + 5
    return rows


@settings(max_examples=200, deadline=None, derandomize=True)
@given(nests())
def test_loops_are_not_counted_in_addition_to_their_bodies(
    rows: list[tuple[int, int, int]],
) -> None:
    events = Intervals.from_rows([(float(a), float(b), operation) for a, b, operation in rows])
    self_times = self_intervals(events, {WHILE})
    leaves = [(a, b, operation) for a, b, operation in rows if operation != WHILE]
    assert sorted(
        zip(self_times.starts, self_times.ends, self_times.operations, strict=True)
    ) == sorted(leaves)


def test_an_enclosing_operation_keeps_the_rest_of_its_time() -> None:
    events = Intervals.from_rows(
        [(0.0, 100.0, 1), (20.0, 30.0, 2), (50.0, 80.0, 3), (60.0, 70.0, 2)]
    )
    assert self_intervals(events, {WHILE}).operation_times(4).tolist() == [0, 60, 20, 20]


def test_a_loop_without_traced_body_counts_entirely() -> None:
    events = Intervals.from_rows([(0.0, 100.0, WHILE), (100.0, 130.0, 1)])
    assert self_intervals(events, {WHILE}).operation_times(2).tolist() == [100, 30]


def test_overlapping_kernels_on_a_stream_do_not_nest() -> None:
    events = Intervals.from_rows([(0.0, 50.0, 1), (46.0, 60.0, 2), (60.0, 70.0, 1)])
    self_times = self_intervals(events, {WHILE})
    assert self_times.operation_times(3).tolist() == [0, 60, 14]
    assert IntervalUnion(self_times.starts, self_times.ends).length == 70


def test_an_inner_event_may_end_a_nanosecond_late() -> None:
    events = Intervals.from_rows([(0.0, 100.0, 1), (50.0, 101.0, 2), (100.0, 120.0, 3)])
    assert self_intervals(events, {WHILE}).operation_times(4).tolist() == [0, 50, 50, 20]


def test_empty_intervals_have_no_length() -> None:
    no_intervals = Intervals.from_rows([])
    assert self_intervals(no_intervals, set()).operation_times(2).tolist() == [0, 0]
    assert IntervalUnion(no_intervals.starts, no_intervals.ends).length == 0
    assert (
        uncovered_time(no_intervals, IntervalUnion(no_intervals.starts, no_intervals.ends)).size
        == 0
    )
    assert np.size(Intervals.concatenate([]).starts) == 0
