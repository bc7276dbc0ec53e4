"""Overlap and waits, in exact seconds from the machine's constants."""

from __future__ import annotations

from itertools import pairwise

import pytest

from drumline.inspect.cost.timeline import DEVICE, Timeline
from tests.inspect.cost.modules import DOT, UP_Y, X, Y, computation, counted_loop
from tests.inspect.cost.timelines import (
    GATHER,
    MACHINE,
    MATMUL,
    OUT,
    SHARD,
    SIDE,
    P,
    event_named,
    gather,
    simulate_lines,
)

ITERATION = MACHINE.constants.operation_seconds
"""The overhead of one iteration of a loop."""


def test_an_independent_collective_is_hidden_behind_a_matmul() -> None:
    timeline = simulate_lines(f"""{P}
    %g = bf16[4096,1024] all-gather(%r), {Y}, dimensions={{0}}
    %y = {OUT} dot(%p, %q), {DOT}
    ROOT %t = (bf16[4096,1024], {OUT}) tuple(%g, %y)
    """)
    assert timeline.seconds == pytest.approx(MATMUL)
    assert event_named(timeline, "g").seconds == pytest.approx(GATHER)
    assert event_named(timeline, "g").exposed == 0
    assert (event_named(timeline, "g").start, event_named(timeline, "y").start) == (0, 0)


def test_a_collective_that_is_longer_is_exposed_by_the_difference() -> None:
    timeline = simulate_lines(f"""
    %p = bf16[1024,1024] parameter(0)
    %r = bf16[8192,1024] parameter(1)
    %g = bf16[32768,1024] all-gather(%r), {Y}, dimensions={{0}}
    %y = bf16[1024,1024] dot(%p, %p), {DOT}
    ROOT %t = (bf16[32768,1024], bf16[1024,1024]) tuple(%g, %y)
    """)
    gather_seconds = gather(8192 * 1024 * 2)
    assert timeline.seconds == pytest.approx(gather_seconds)
    assert event_named(timeline, "g").exposed == pytest.approx(
        gather_seconds - event_named(timeline, "y").seconds
    )


def test_a_collective_that_a_matmul_needs_is_exposed() -> None:
    timeline = simulate_lines(f"""
    %p = bf16[1024,4096] parameter(0)
    %q = bf16[4096,4096] parameter(1)
    %g = bf16[4096,4096] all-gather(%p), {Y}, dimensions={{0}}
    ROOT %y = bf16[4096,4096] dot(%g, %q), {DOT}
    """)
    gather_seconds = gather(1024 * 4096 * 2)
    assert event_named(timeline, "g").exposed == pytest.approx(gather_seconds)
    assert timeline.seconds == pytest.approx(gather_seconds + MATMUL)


def test_a_collective_that_takes_a_matmul_is_exposed_behind_it() -> None:
    timeline = simulate_lines(f"""{P}
    %y = {OUT} dot(%p, %q), {DOT}
    ROOT %s2 = bf16[1024,4096] reduce-scatter(%y), {Y}, dimensions={{0}}, to_apply=%sum
    """)
    scatter = 3e-6 + 0.75 * SIDE**2 * 2 / (4.5e10 * 0.9) + 3e-6
    # The matmul's result is too large to stay on the chip.
    assert timeline.seconds == pytest.approx(MATMUL + scatter)
    assert event_named(timeline, "s2").exposed == pytest.approx(scatter)


def two_gathers(first: str, second: str) -> Timeline:
    return simulate_lines(f"""{P}
    %g = bf16[4096,1024] all-gather(%r), {first}, dimensions={{0}}
    %h = bf16[4096,1024] all-gather(%s), {second}, dimensions={{0}}
    ROOT %t = (bf16[4096,1024], bf16[4096,1024]) tuple(%g, %h)
    """)


def test_two_collectives_on_one_link_run_in_sequence() -> None:
    # The link is free for the second collective during the latency of the first.
    timeline = two_gathers(Y, Y)
    assert timeline.seconds == pytest.approx(2 * GATHER - gather(0, "Y"))
    assert sum(event.exposed for event in timeline.events) == pytest.approx(timeline.seconds)


def test_two_collectives_on_two_axes_overlap() -> None:
    timeline = two_gathers(X, Y)
    assert timeline.seconds == pytest.approx(max(gather(SHARD, "X"), GATHER))
    # The device's waiting time counts once.
    assert sum(event.exposed for event in timeline.events) == pytest.approx(timeline.seconds)


def test_the_operation_with_the_most_dependents_runs_first() -> None:
    timeline = simulate_lines(f"""{P}
    %late = {OUT} dot(%q, %p), {DOT}
    %early = {OUT} dot(%p, %q), {DOT}
    %s2 = bf16[1024,4096] reduce-scatter(%early), {Y}, dimensions={{0}}, to_apply=%sum
    ROOT %t = ({OUT}, bf16[1024,4096]) tuple(%late, %s2)
    """)
    assert event_named(timeline, "early").start == 0
    assert event_named(timeline, "s2").exposed < event_named(timeline, "s2").seconds
    assert timeline.seconds == pytest.approx(2 * MATMUL)


def test_an_all_reduce_followed_by_a_slice_is_a_reduce_scatter() -> None:
    timeline = simulate_lines(f"""
    %p = f32[4096,1024] parameter(0)
    %i = s32[] parameter(1)
    %zero = s32[] constant(0)
    %r = f32[4096,1024] all-reduce(%p), {Y}, to_apply=%sum
    ROOT %d = f32[1024,1024] dynamic-slice(%r, %i, %zero), dynamic_slice_sizes={{1024,1024}}
    """)
    scatter = 3e-6 + 0.75 * 4096 * 1024 * 4 / (4.5e10 * 0.9) + 3e-6
    assert event_named(timeline, "r").kind == "reduce-scatter"
    assert event_named(timeline, "r").seconds == pytest.approx(scatter)


def test_groups_of_one_device_take_no_time() -> None:
    single_groups = "channel_id=1, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    timeline = simulate_lines(f"""
    %p = f32[4096,1024] parameter(0)
    ROOT %r = f32[4096,1024] all-reduce(%p), {single_groups}, to_apply=%sum
    """)
    assert timeline.seconds == 0


# Loops -------------------------------------------------------------------------------------------

CARRIED = f"(s32[], {OUT}, {OUT})"


def loop_timeline(trip_count: int | None, collective: str = "", concurrent: str = "") -> Timeline:
    """Return the timeline of a loop with a matmul in each iteration, and optionally a permute."""
    operand = "moved" if collective else "x"
    line, condition, body = counted_loop(
        trip_count,
        f"""
        %c = {CARRIED} parameter(0)
        %i = s32[] get-tuple-element(%c), index=0
        %x = {OUT} get-tuple-element(%c), index=1
        %w = {OUT} get-tuple-element(%c), index=2
        %one = s32[] constant(1)
        %next = s32[] add(%i, %one)
        {collective or "%nothing = s32[] constant(0)"}
        %y = {OUT} dot(%{operand}, %w), {DOT}
        ROOT %t = {CARRIED} tuple(%next, %y, %w)
        """,
        CARRIED,
        "begin",
    )
    other = concurrent or "%other = s32[] constant(0)"
    return simulate_lines(
        f"""{P}
        %zero = s32[] constant(0)
        %begin = {CARRIED} tuple(%zero, %p, %q)
        {line}
        {other}
        %done = {OUT} get-tuple-element(%loop), index=1
        ROOT %all = ({OUT}, bf16[4096,1024]) tuple(%done, %other)
        """,
        condition,
        body,
    )


PERMUTE = f"%moved = {OUT} collective-permute(%x), {UP_Y}"
HOP = 3e-6 + SIDE**2 * 2 / (4.5e10 * 0.9) + 3e-6


def test_a_loop_takes_as_long_as_all_its_iterations() -> None:
    timeline = loop_timeline(10)
    assert timeline.seconds == pytest.approx(10 * (MATMUL + ITERATION))
    assert not timeline.unknown_trip_count
    ((event, executions),) = timeline.leaf_events()
    assert (event.kind, executions) == ("matmul", 10)


def test_a_wait_in_a_loop_counts_in_every_iteration() -> None:
    timeline = loop_timeline(10, PERMUTE)
    assert timeline.seconds == pytest.approx(10 * (MATMUL + HOP + ITERATION))
    waits = sum(event.exposed * executions for event, executions in timeline.leaf_events())
    assert waits == pytest.approx(10 * HOP)


def test_a_loop_of_unknown_length_counts_once_and_is_marked() -> None:
    timeline = loop_timeline(None)
    assert timeline.seconds == pytest.approx(MATMUL + ITERATION)
    assert timeline.unknown_trip_count


@pytest.mark.parametrize(("groups", "axis"), [(X, "X"), (Y, "Y")])
def test_a_loop_holds_the_links_that_its_iterations_use(groups: str, axis: str) -> None:
    timeline = loop_timeline(
        4, PERMUTE, f"%other = bf16[4096,1024] all-gather(%r), {groups}, dimensions={{0}}"
    )
    loop = 4 * (MATMUL + HOP + ITERATION)
    expected_seconds = loop if axis == "X" else loop + gather(SHARD, axis) - gather(0, axis)
    assert timeline.seconds == pytest.approx(expected_seconds)


def test_a_loop_without_communication_hides_a_collective() -> None:
    timeline = loop_timeline(
        4, "", f"%other = bf16[4096,1024] all-gather(%r), {Y}, dimensions={{0}}"
    )
    assert timeline.seconds == pytest.approx(4 * (MATMUL + ITERATION))
    assert event_named(timeline, "other").exposed == 0


def test_the_longer_branch_of_a_condition_counts() -> None:
    short_branch = computation(
        "little",
        f"""
        %a = {OUT} parameter(0)
        ROOT %n = {OUT} negate(%a)
        """,
    )
    long_branch = computation(
        "much",
        f"""
        %b = {OUT} parameter(0)
        ROOT %y = {OUT} dot(%b, %b), {DOT}
        """,
    )
    timeline = simulate_lines(
        f"""{P}
        %which = pred[] parameter(4)
        ROOT %c = {OUT} conditional(%which, %p, %p), true_computation=%little, \
false_computation=%much
        """,
        short_branch,
        long_branch,
    )
    same_operand = 2 * SIDE**3 / (1.97e14 * 0.98) + 0.25 * 2 * 2 * SIDE**2 / (8.2e11 * 0.92)
    assert timeline.seconds == pytest.approx(same_operand + 0.3e-6)


def test_the_device_and_its_links_run_one_operation_at_a_time() -> None:
    timeline = loop_timeline(
        4, PERMUTE, f"%other = bf16[4096,1024] all-gather(%r), {Y}, dimensions={{0}}"
    )
    for resource in {link for event in timeline.events for link in event.resource.split("+")}:
        spans = sorted(
            (event.start, event.end)
            for event in timeline.events
            if resource in event.resource.split("+")
        )
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert (
        max(event.end for event in timeline.events if event.resource == DEVICE) <= timeline.seconds
    )
