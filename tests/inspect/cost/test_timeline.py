"""What overlaps and what waits, in exact seconds made of the machine's own constants."""

from __future__ import annotations

from itertools import pairwise

import pytest

from drumline.inspect.cost.machines import machine
from drumline.inspect.cost.network import lay
from drumline.inspect.cost.timeline import COPIES, DEVICE, Player, Timeline, TimelineEvent
from tests.inspect.cost.modules import (
    DOT,
    UP_Y,
    X,
    Y,
    computation,
    counted_loop,
    module,
)

MESH = {"X": 2, "Y": 4}
ON = machine("v5litepod-8")
NETWORK = lay(MESH, ON)
TURN = ON.constants.operation
"""To begin another turn of a loop."""


def played(lines: str, *others: str, scheduled: bool = False) -> Timeline:
    return Player(module(lines, *others), NETWORK, MESH, scheduled).play()


def named(timeline: Timeline, name: str) -> TimelineEvent:
    (event,) = (event for event in timeline.events if event.name == name)
    return event


def product(side: int) -> float:
    """Seconds of a product of two square bfloat16 matrices, with its own starting."""
    multiplying = 2 * side**3 / (1.97e14 * 0.98)
    loading = 3 * 2 * side**2 / (8.2e11 * 0.92)
    return multiplying + 0.25 * loading + 0.3e-6


def gather(shard: float, axis: str = "Y") -> float:
    """Seconds of an all-gather over a line."""
    length = MESH[axis]
    return 3e-6 + (length - 1) * (shard / (4.5e10 * 0.9) + 1e-6)


SIDE = 4096
PRODUCT = product(SIDE)
SHARD = 1024 * 1024 * 2
GATHER = gather(SHARD)
P = f"""
    %p = bf16[{SIDE},{SIDE}] parameter(0)
    %q = bf16[{SIDE},{SIDE}] parameter(1)
    %r = bf16[1024,1024] parameter(2)
    %s = bf16[1024,1024] parameter(3)
"""
OUT = f"bf16[{SIDE},{SIDE}]"


# Scheduled here ----------------------------------------------------------------------------------


def test_an_independent_collective_is_hidden_behind_a_product() -> None:
    told = played(f"""{P}
    %g = bf16[4096,1024] all-gather(%r), {Y}, dimensions={{0}}
    %y = {OUT} dot(%p, %q), {DOT}
    ROOT %t = (bf16[4096,1024], {OUT}) tuple(%g, %y)
    """)
    assert told.seconds == pytest.approx(PRODUCT)
    assert named(told, "g").seconds == pytest.approx(GATHER)
    assert named(told, "g").exposed == 0
    assert (named(told, "g").start, named(told, "y").start) == (0, 0)


def test_a_collective_that_is_longer_is_exposed_by_the_difference() -> None:
    told = played(f"""
    %p = bf16[1024,1024] parameter(0)
    %r = bf16[8192,1024] parameter(1)
    %g = bf16[32768,1024] all-gather(%r), {Y}, dimensions={{0}}
    %y = bf16[1024,1024] dot(%p, %p), {DOT}
    ROOT %t = (bf16[32768,1024], bf16[1024,1024]) tuple(%g, %y)
    """)
    took = gather(8192 * 1024 * 2)
    assert told.seconds == pytest.approx(took)
    assert named(told, "g").exposed == pytest.approx(took - named(told, "y").seconds)


def test_a_collective_that_a_product_needs_is_exposed() -> None:
    told = played(f"""
    %p = bf16[1024,4096] parameter(0)
    %q = bf16[4096,4096] parameter(1)
    %g = bf16[4096,4096] all-gather(%p), {Y}, dimensions={{0}}
    ROOT %y = bf16[4096,4096] dot(%g, %q), {DOT}
    """)
    took = gather(1024 * 4096 * 2)
    assert named(told, "g").exposed == pytest.approx(took)
    assert told.seconds == pytest.approx(took + PRODUCT)


def test_a_collective_that_takes_a_product_is_exposed_behind_it() -> None:
    told = played(f"""{P}
    %y = {OUT} dot(%p, %q), {DOT}
    ROOT %s2 = bf16[1024,4096] reduce-scatter(%y), {Y}, dimensions={{0}}, to_apply=%sum
    """)
    scatter = 3e-6 + 0.75 * SIDE**2 * 2 / (4.5e10 * 0.9) + 3e-6
    # The product's result stays on no chip: it is too large.
    assert told.seconds == pytest.approx(PRODUCT + scatter)
    assert named(told, "s2").exposed == pytest.approx(scatter)


def two_gathers(first: str, second: str) -> Timeline:
    return played(f"""{P}
    %g = bf16[4096,1024] all-gather(%r), {first}, dimensions={{0}}
    %h = bf16[4096,1024] all-gather(%s), {second}, dimensions={{0}}
    ROOT %t = (bf16[4096,1024], bf16[4096,1024]) tuple(%g, %h)
    """)


def test_two_collectives_on_one_link_follow_one_another() -> None:
    # The link is free for the second while the first still has its latency to go.
    told = two_gathers(Y, Y)
    assert told.seconds == pytest.approx(2 * GATHER - gather(0, "Y"))
    assert sum(event.exposed for event in told.events) == pytest.approx(told.seconds)


def test_two_collectives_on_two_axes_run_together() -> None:
    told = two_gathers(X, Y)
    assert told.seconds == pytest.approx(max(gather(SHARD, "X"), GATHER))
    # What the device waits for is told once.
    assert sum(event.exposed for event in told.events) == pytest.approx(told.seconds)


def test_what_most_depends_on_goes_first() -> None:
    told = played(f"""{P}
    %late = {OUT} dot(%q, %p), {DOT}
    %early = {OUT} dot(%p, %q), {DOT}
    %s2 = bf16[1024,4096] reduce-scatter(%early), {Y}, dimensions={{0}}, to_apply=%sum
    ROOT %t = ({OUT}, bf16[1024,4096]) tuple(%late, %s2)
    """)
    assert named(told, "early").start == 0
    assert named(told, "s2").exposed < named(told, "s2").seconds
    assert told.seconds == pytest.approx(2 * PRODUCT)


def test_an_all_reduce_of_which_each_keeps_a_part_is_a_reduce_scatter() -> None:
    told = played(f"""
    %p = f32[4096,1024] parameter(0)
    %i = s32[] parameter(1)
    %zero = s32[] constant(0)
    %r = f32[4096,1024] all-reduce(%p), {Y}, to_apply=%sum
    ROOT %d = f32[1024,1024] dynamic-slice(%r, %i, %zero), dynamic_slice_sizes={{1024,1024}}
    """)
    scatter = 3e-6 + 0.75 * 4096 * 1024 * 4 / (4.5e10 * 0.9) + 3e-6
    assert named(told, "r").kind == "reduce-scatter"
    assert named(told, "r").seconds == pytest.approx(scatter)


def test_groups_of_one_device_take_no_time() -> None:
    alone = "channel_id=1, replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}"
    told = played(f"""
    %p = f32[4096,1024] parameter(0)
    ROOT %r = f32[4096,1024] all-reduce(%p), {alone}, to_apply=%sum
    """)
    assert told.seconds == 0


# Loops -------------------------------------------------------------------------------------------

CARRIED = f"(s32[], {OUT}, {OUT})"


def looped(turns: int | None, collective: str = "", beside: str = "") -> Timeline:
    """A loop whose every turn multiplies, after a permute if it has one."""
    taken = "moved" if collective else "x"
    line, condition, body = counted_loop(
        turns,
        f"""
        %c = {CARRIED} parameter(0)
        %i = s32[] get-tuple-element(%c), index=0
        %x = {OUT} get-tuple-element(%c), index=1
        %w = {OUT} get-tuple-element(%c), index=2
        %one = s32[] constant(1)
        %next = s32[] add(%i, %one)
        {collective or "%nothing = s32[] constant(0)"}
        %y = {OUT} dot(%{taken}, %w), {DOT}
        ROOT %t = {CARRIED} tuple(%next, %y, %w)
        """,
        CARRIED,
        "begin",
    )
    other = beside or "%other = s32[] constant(0)"
    return played(
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


def test_a_loop_takes_as_long_as_all_its_turns() -> None:
    told = looped(10)
    assert told.seconds == pytest.approx(10 * (PRODUCT + TURN))
    assert not told.unknown_turns
    ((event, times),) = told.flat()
    assert (event.kind, times) == ("matmul", 10)


def test_what_waits_in_a_loop_waits_in_every_turn() -> None:
    told = looped(10, PERMUTE)
    assert told.seconds == pytest.approx(10 * (PRODUCT + HOP + TURN))
    waits = sum(event.exposed * times for event, times in told.flat())
    assert waits == pytest.approx(10 * HOP)


def test_a_loop_of_unknown_length_counts_once_and_says_so() -> None:
    told = looped(None)
    assert told.seconds == pytest.approx(PRODUCT + TURN)
    assert told.unknown_turns


@pytest.mark.parametrize(("over", "axis"), [(X, "X"), (Y, "Y")])
def test_a_loop_holds_the_links_that_its_turns_use(over: str, axis: str) -> None:
    told = looped(4, PERMUTE, f"%other = bf16[4096,1024] all-gather(%r), {over}, dimensions={{0}}")
    loop = 4 * (PRODUCT + HOP + TURN)
    alone = loop if axis == "X" else loop + gather(SHARD, axis) - gather(0, axis)
    assert told.seconds == pytest.approx(alone)


def test_a_loop_without_communication_hides_a_collective() -> None:
    told = looped(4, "", f"%other = bf16[4096,1024] all-gather(%r), {Y}, dimensions={{0}}")
    assert told.seconds == pytest.approx(4 * (PRODUCT + TURN))
    assert named(told, "other").exposed == 0


def test_of_a_condition_the_longer_branch_counts() -> None:
    little = computation(
        "little",
        f"""
        %a = {OUT} parameter(0)
        ROOT %n = {OUT} negate(%a)
        """,
    )
    much = computation(
        "much",
        f"""
        %b = {OUT} parameter(0)
        ROOT %y = {OUT} dot(%b, %b), {DOT}
        """,
    )
    told = played(
        f"""{P}
        %which = pred[] parameter(4)
        ROOT %c = {OUT} conditional(%which, %p, %p), true_computation=%little, \
false_computation=%much
        """,
        little,
        much,
    )
    same_operand = 2 * SIDE**3 / (1.97e14 * 0.98) + 0.25 * 2 * 2 * SIDE**2 / (8.2e11 * 0.92)
    assert told.seconds == pytest.approx(same_operand + 0.3e-6)


# Scheduled by the TPU's compiler -----------------------------------------------------------------

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


def ordered(lines: str, *others: str) -> Timeline:
    return played(lines, FUSED_PRODUCT, *others, scheduled=True)


def test_the_compiler_s_own_estimate_of_a_product_counts() -> None:
    told = ordered(f"""{P}
    ROOT %y = {OUT} {FUSION}
    """)
    assert told.seconds == pytest.approx(FUSION_SECONDS)
    assert named(told, "y").cost.cycles == pytest.approx(CYCLES / 1.5e9)
    assert named(told, "y").cost.flops == 2 * SIDE**3


def test_its_estimate_of_moving_data_does_not() -> None:
    told = ordered(
        f"""{P}
        ROOT %y = {OUT} fusion(%p), kind=kLoop, calls=%negated, \
backend_config={{"estimated_cycles":"999999999"}}
        """,
        computation("negated", f"%a = {OUT} parameter(0)\nROOT %n = {OUT} negate(%a)"),
    )
    loading = 2 * 2 * SIDE**2 / (8.2e11 * 0.92)
    computing = SIDE**2 / (4096 * 1.5e9)
    assert told.seconds == pytest.approx(loading + 0.25 * computing + 0.3e-6)


def test_what_lies_between_start_and_end_hides_a_permute() -> None:
    told = ordered(f"""{P}
    %start = {START} collective-permute-start(%r), {UP_Y}
    %y = {OUT} {FUSION}
    %end = bf16[1024,1024] collective-permute-done(%start)
    ROOT %t = ({OUT}, bf16[1024,1024]) tuple(%y, %end)
    """)
    assert told.seconds == pytest.approx(FUSION_SECONDS)
    assert named(told, "start").seconds == pytest.approx(SMALL_HOP)
    assert named(told, "start").exposed == 0


def test_what_lies_behind_the_end_does_not() -> None:
    told = ordered(f"""{P}
    %start = {START} collective-permute-start(%r), {UP_Y}
    %end = bf16[1024,1024] collective-permute-done(%start)
    %y = {OUT} {FUSION}
    ROOT %t = ({OUT}, bf16[1024,1024]) tuple(%y, %end)
    """)
    assert told.seconds == pytest.approx(FUSION_SECONDS + SMALL_HOP)
    assert named(told, "start").exposed == pytest.approx(SMALL_HOP)


def test_a_collective_without_start_and_end_waits() -> None:
    told = ordered(f"""{P}
    %g = bf16[4096,1024] all-gather(%r), {Y}, dimensions={{0}}
    %y = {OUT} {FUSION}
    ROOT %t = ({OUT}, bf16[4096,1024]) tuple(%y, %g)
    """)
    assert told.seconds == pytest.approx(FUSION_SECONDS + GATHER)
    assert named(told, "g").exposed == pytest.approx(GATHER)


def test_two_that_are_started_together_share_a_link_in_turn() -> None:
    told = ordered(f"""{P}
    %one = {START} collective-permute-start(%r), {UP_Y}
    %two = {START} collective-permute-start(%s), {UP_Y}
    %one.end = bf16[1024,1024] collective-permute-done(%one)
    %two.end = bf16[1024,1024] collective-permute-done(%two)
    ROOT %t = (bf16[1024,1024], bf16[1024,1024]) tuple(%one.end, %two.end)
    """)
    latency = NETWORK.seconds("collective-permute", 0.0, ("Y",))
    assert named(told, "two").start == pytest.approx(SMALL_HOP - latency)
    assert told.seconds == pytest.approx(2 * SMALL_HOP - latency)
    assert sum(event.exposed for event in told.events) == pytest.approx(told.seconds)


def test_a_collective_that_is_fused_with_others_work_runs_from_start_to_end() -> None:
    gather = f"%g = bf16[4096,1024] all-gather(%a), channel_id=7, {Y}, dimensions={{0}}"
    parts = [
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
    told = ordered(
        f"""{P}
        %start = bf16[4096,1024] fusion(%r), kind=kCustom, calls=%part.Start
        %y = {OUT} {FUSION}
        %end = bf16[4096,1024] fusion(%start), kind=kCustom, calls=%part.Done
        ROOT %t = ({OUT}, bf16[4096,1024]) tuple(%y, %end)
        """,
        *parts,
    )
    assert told.seconds == pytest.approx(max(FUSION_SECONDS, GATHER))
    assert named(told, "g").exposed == pytest.approx(max(0.0, GATHER - FUSION_SECONDS))


def test_a_wrapped_collective_starts_with_its_wrapper() -> None:
    wrapped = computation(
        "wrapped",
        f"""
        %a = bf16[1024,1024] parameter(0)
        ROOT %g = bf16[4096,1024] all-gather(%a), {Y}, dimensions={{0}}
        """,
    )
    told = ordered(
        f"""{P}
        %start = ((bf16[1024,1024]), bf16[4096,1024], u32[]) async-start(%r), calls=%wrapped
        %y = {OUT} {FUSION}
        %end = bf16[4096,1024] async-done(%start), calls=%wrapped
        ROOT %t = ({OUT}, bf16[4096,1024]) tuple(%y, %end)
        """,
        wrapped,
    )
    assert told.seconds == pytest.approx(FUSION_SECONDS)
    (sent,) = (event for event in told.events if event.kind == "all-gather")
    assert sent.seconds == pytest.approx(GATHER)


BIG = "bf16[16384,16384]"
COPY = 2 * 16384**2 / (8.2e11 * 0.92)


@pytest.mark.parametrize("beside", [True, False])
def test_a_copy_between_memories_runs_beside_the_computing(beside: bool) -> None:
    work = f"%y = {OUT} {FUSION}"
    told = ordered(f"""{P}
    %b = {BIG}{{1,0:T(8,128)(2,1)}} parameter(4)
    %start = ({BIG}{{1,0:T(8,128)(2,1)S(1)}}, {BIG}{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) \
copy-start(%b)
    {work if beside else ""}
    %end = {BIG}{{1,0:T(8,128)(2,1)S(1)}} copy-done(%start)
    {"" if beside else work}
    ROOT %t = ({OUT}, {BIG}) tuple(%y, %end)
    """)
    copied = named(told, "start")
    assert copied.resource == COPIES
    assert copied.seconds == pytest.approx(COPY, rel=0.01)
    hidden = max(FUSION_SECONDS, copied.seconds)
    assert told.seconds == pytest.approx(hidden if beside else FUSION_SECONDS + copied.seconds)
    assert copied.exposed == pytest.approx(
        max(0.0, copied.seconds - FUSION_SECONDS) if beside else copied.seconds
    )


def test_what_the_program_before_has_fetched_takes_no_time() -> None:
    told = ordered(f"""{P}
    %b = {BIG}{{1,0:T(8,128)(2,1)}} parameter(4)
    %start = ({BIG}{{1,0:T(8,128)(2,1)S(1)}}, {BIG}{{1,0:T(8,128)(2,1)}}, u32[]{{:S(2)}}) \
copy-start(%b), cross_program_prefetch_index=0
    %end = {BIG}{{1,0:T(8,128)(2,1)S(1)}} copy-done(%start)
    ROOT %y = {OUT} {FUSION}
    """)
    assert told.seconds == pytest.approx(FUSION_SECONDS)


def test_the_device_and_its_links_are_never_busy_twice() -> None:
    told = looped(4, PERMUTE, f"%other = bf16[4096,1024] all-gather(%r), {Y}, dimensions={{0}}")
    for resource in {link for event in told.events for link in event.resource.split("+")}:
        spans = sorted(
            (event.start, event.end)
            for event in told.events
            if resource in event.resource.split("+")
        )
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert max(event.end for event in told.events if event.resource == DEVICE) <= told.seconds
