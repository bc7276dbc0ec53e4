"""Waits in a program that the TPU's compiler has scheduled, by its order and its estimates."""

from __future__ import annotations

import pytest

from drumline.inspect.cost.timeline import COPIES, Timeline
from tests.inspect.cost.modules import UP_Y, Y, computation
from tests.inspect.cost.timelines import (
    GATHER,
    NETWORK,
    OUT,
    SHARD,
    SIDE,
    P,
    event_named,
    simulate_lines,
)

FUSED_PRODUCT = computation(
    "product",
    f"""
    %a = {OUT} parameter(0)
    %b = {OUT} parameter(1)
    ROOT %y = {OUT} convolution(%a, %b), dim_labels=bf_io->bf
    """,
)
CYCLES = 1_200_000
FUSION = f"""fusion(%p, %q), kind=kOutput, calls=%product, \
backend_config={{"window_config":{{"kernel_window_bounds":[]}},"estimated_cycles":"{CYCLES}"}}"""
FUSION_SECONDS = CYCLES / 1.5e9 + 0.3e-6
START = "(bf16[1024,1024], bf16[1024,1024], u32[], u32[])"
SMALL_HOP = 3e-6 + SHARD / (4.5e10 * 0.9) + 3e-6


def simulate_scheduled(lines: str, *others: str) -> Timeline:
    return simulate_lines(lines, FUSED_PRODUCT, *others, scheduled=True)


def test_the_compiler_s_own_estimate_of_a_matmul_counts() -> None:
    timeline = simulate_scheduled(f"""{P}
    ROOT %y = {OUT} {FUSION}
    """)
    assert timeline.seconds == pytest.approx(FUSION_SECONDS)
    assert event_named(timeline, "y").cost.compiler_seconds == pytest.approx(CYCLES / 1.5e9)
    assert event_named(timeline, "y").cost.flops == 2 * SIDE**3


def test_the_compilers_estimate_of_moving_data_does_not_count() -> None:
    timeline = simulate_scheduled(
        f"""{P}
        ROOT %y = {OUT} fusion(%p), kind=kLoop, calls=%negated, \
backend_config={{"estimated_cycles":"999999999"}}
        """,
        computation("negated", f"%a = {OUT} parameter(0)\nROOT %n = {OUT} negate(%a)"),
    )
    loading = 2 * 2 * SIDE**2 / (8.2e11 * 0.92)
    computing = SIDE**2 / (4096 * 1.5e9)
    assert timeline.seconds == pytest.approx(loading + 0.25 * computing + 0.3e-6)


def test_operations_between_start_and_done_hide_a_permute() -> None:
    timeline = simulate_scheduled(f"""{P}
    %start = {START} collective-permute-start(%r), {UP_Y}
    %y = {OUT} {FUSION}
    %end = bf16[1024,1024] collective-permute-done(%start)
    ROOT %t = ({OUT}, bf16[1024,1024]) tuple(%y, %end)
    """)
    assert timeline.seconds == pytest.approx(FUSION_SECONDS)
    assert event_named(timeline, "start").seconds == pytest.approx(SMALL_HOP)
    assert event_named(timeline, "start").exposed == 0


def test_operations_after_done_do_not_hide_a_permute() -> None:
    timeline = simulate_scheduled(f"""{P}
    %start = {START} collective-permute-start(%r), {UP_Y}
    %end = bf16[1024,1024] collective-permute-done(%start)
    %y = {OUT} {FUSION}
    ROOT %t = ({OUT}, bf16[1024,1024]) tuple(%y, %end)
    """)
    assert timeline.seconds == pytest.approx(FUSION_SECONDS + SMALL_HOP)
    assert event_named(timeline, "start").exposed == pytest.approx(SMALL_HOP)


def test_a_collective_without_start_and_done_is_exposed() -> None:
    timeline = simulate_scheduled(f"""{P}
    %g = bf16[4096,1024] all-gather(%r), {Y}, dimensions={{0}}
    %y = {OUT} {FUSION}
    ROOT %t = ({OUT}, bf16[4096,1024]) tuple(%y, %g)
    """)
    assert timeline.seconds == pytest.approx(FUSION_SECONDS + GATHER)
    assert event_named(timeline, "g").exposed == pytest.approx(GATHER)


def test_two_permutes_that_start_together_use_a_link_in_turn() -> None:
    timeline = simulate_scheduled(f"""{P}
    %one = {START} collective-permute-start(%r), {UP_Y}
    %two = {START} collective-permute-start(%s), {UP_Y}
    %one.end = bf16[1024,1024] collective-permute-done(%one)
    %two.end = bf16[1024,1024] collective-permute-done(%two)
    ROOT %t = (bf16[1024,1024], bf16[1024,1024]) tuple(%one.end, %two.end)
    """)
    latency = NETWORK.collective_seconds("collective-permute", 0.0, ("Y",))
    assert event_named(timeline, "two").start == pytest.approx(SMALL_HOP - latency)
    assert timeline.seconds == pytest.approx(2 * SMALL_HOP - latency)
    assert sum(event.exposed for event in timeline.events) == pytest.approx(timeline.seconds)


def test_a_fused_collective_runs_from_its_start_to_its_done() -> None:
    gather = f"%g = bf16[4096,1024] all-gather(%a), channel_id=7, {Y}, dimensions={{0}}"
    start_and_done = [
        computation(
            f"part.{mark}",
            f"""
            %a = bf16[1024,1024] parameter(0)
            {gather}
            ROOT %c = bf16[4096,1024] custom-call(%g), custom_call_target="AsyncCollective{mark}"
            """,
        )
        for mark in ("Start", "Done")
    ]
    timeline = simulate_scheduled(
        f"""{P}
        %start = bf16[4096,1024] fusion(%r), kind=kCustom, calls=%part.Start
        %y = {OUT} {FUSION}
        %end = bf16[4096,1024] fusion(%start), kind=kCustom, calls=%part.Done
        ROOT %t = ({OUT}, bf16[4096,1024]) tuple(%y, %end)
        """,
        *start_and_done,
    )
    assert timeline.seconds == pytest.approx(max(FUSION_SECONDS, GATHER))
    assert event_named(timeline, "g").exposed == pytest.approx(max(0.0, GATHER - FUSION_SECONDS))


def test_a_wrapped_collective_starts_with_its_wrapper() -> None:
    wrapped = computation(
        "wrapped",
        f"""
        %a = bf16[1024,1024] parameter(0)
        ROOT %g = bf16[4096,1024] all-gather(%a), {Y}, dimensions={{0}}
        """,
    )
    timeline = simulate_scheduled(
        f"""{P}
        %start = ((bf16[1024,1024]), bf16[4096,1024], u32[]) async-start(%r), calls=%wrapped
        %y = {OUT} {FUSION}
        %end = bf16[4096,1024] async-done(%start), calls=%wrapped
        ROOT %t = ({OUT}, bf16[4096,1024]) tuple(%y, %end)
        """,
        wrapped,
    )
    assert timeline.seconds == pytest.approx(FUSION_SECONDS)
    (gather_event,) = (event for event in timeline.events if event.kind == "all-gather")
    assert gather_event.seconds == pytest.approx(GATHER)


BIG = "bf16[16384,16384]"
COPY = 2 * 16384**2 / (8.2e11 * 0.92)


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_copy_between_memories_overlaps_with_compute(overlaps: bool) -> None:
    matmul_line = f"%y = {OUT} {FUSION}"
    timeline = simulate_scheduled(f"""{P}
    %b = {BIG}{{1,0:T(8,128)(2,1)}} parameter(4)
    %start = ({BIG}{{1,0:T(8,128)(2,1)S(1)}}, {BIG}{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) \
copy-start(%b)
    {matmul_line if overlaps else ""}
    %end = {BIG}{{1,0:T(8,128)(2,1)S(1)}} copy-done(%start)
    {"" if overlaps else matmul_line}
    ROOT %t = ({OUT}, {BIG}) tuple(%y, %end)
    """)
    copy_event = event_named(timeline, "start")
    assert copy_event.resource == COPIES
    assert copy_event.seconds == pytest.approx(COPY, rel=0.01)
    hidden = max(FUSION_SECONDS, copy_event.seconds)
    assert timeline.seconds == pytest.approx(
        hidden if overlaps else FUSION_SECONDS + copy_event.seconds
    )
    assert copy_event.exposed == pytest.approx(
        max(0.0, copy_event.seconds - FUSION_SECONDS) if overlaps else copy_event.seconds
    )


def test_a_cross_program_prefetch_takes_no_time() -> None:
    timeline = simulate_scheduled(f"""{P}
    %b = {BIG}{{1,0:T(8,128)(2,1)}} parameter(4)
    %start = ({BIG}{{1,0:T(8,128)(2,1)S(1)}}, {BIG}{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) \
copy-start(%b), cross_program_prefetch_index=0
    %end = {BIG}{{1,0:T(8,128)(2,1)S(1)}} copy-done(%start)
    ROOT %y = {OUT} {FUSION}
    """)
    assert timeline.seconds == pytest.approx(FUSION_SECONDS)
