"""What fills a device's memory: from programs written by hand, in bytes."""

from __future__ import annotations

from drumline.inspect.cost.memory import Memory, compiler_memory, estimate_memory
from tests.inspect.cost.modules import DOT, counted_loop, module

MIB = 2**20
SQUARE = "f32[512,512]"  # 1 MiB
P = f"%p = {SQUARE} parameter(0)"


def memory(lines: str, *others: str, head: str = "num_partitions=1") -> Memory:
    return estimate_memory(module(lines, *others, head=head))


def test_arguments_and_outputs() -> None:
    usage = memory(f"""{P}
    %q = f32[1024,512] parameter(1)
    ROOT %n = {SQUARE} negate(%p)
    """)
    assert (usage.arguments, usage.outputs, usage.temporaries) == (3 * MIB, MIB, 0)
    assert usage.total == 4 * MIB


def test_a_result_that_takes_the_place_of_a_donated_argument_needs_no_room() -> None:
    lines = f"""{P}
    %q = f32[1024,512] parameter(1)
    %n = {SQUARE} negate(%p)
    %m = f32[1024,512] negate(%q)
    ROOT %t = ({SQUARE}, f32[1024,512]) tuple(%n, %m)
    """
    entry = "entry_computation_layout={()->f32[]}, num_partitions=1"
    assert memory(lines, head=entry).outputs == 3 * MIB
    one = memory(lines, head=f"input_output_alias={{ {{1}}: (1, {{}}, may-alias) }}, {entry}")
    assert one.outputs == MIB
    alias = "{ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }"
    both = memory(lines, head=f"input_output_alias={alias}, {entry}")
    assert both.outputs == 0
    assert both.total == 3 * MIB


TRAINS = f"""{P}
    %x = f32[512,2048] parameter(1)
    %h = f32[512,2048] dot(%p, %x), {DOT}
    %u = {SQUARE} dot(%h, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
    ROOT %n = {SQUARE} subtract(%p, %u)
    """


def test_temporaries_come_beside_donated_arguments() -> None:
    entry = "entry_computation_layout={()->f32[]}, num_partitions=1"
    kept = memory(TRAINS, head=entry)
    donated = memory(TRAINS, head=f"input_output_alias={{ {{}}: (0, {{}}, may-alias) }}, {entry}")
    # The activations are there before the new weights are, but not instead of the old ones.
    assert (kept.arguments, kept.outputs, kept.temporaries) == (5 * MIB, MIB, 4 * MIB)
    assert (donated.arguments, donated.outputs, donated.temporaries) == (5 * MIB, 0, 4 * MIB)


def test_what_a_kernel_takes_is_there_until_it_ends() -> None:
    usage = memory(f"""
    %p = f32[512,2048] parameter(0)
    %q = f32[2048,512] parameter(1)
    %h = f32[512,2048] negate(%p)
    %y = {SQUARE} dot(%h, %q), {DOT}
    ROOT %n = {SQUARE} tanh(%y)
    """)
    assert usage.outputs + usage.temporaries == (4 + 1) * MIB


def test_values_live_until_they_are_taken_for_the_last_time() -> None:
    usage = memory(f"""{P}
    %a = {SQUARE} dot(%p, %p), {DOT}
    %b = {SQUARE} dot(%a, %p), {DOT}
    %c = {SQUARE} dot(%b, %p), {DOT}
    ROOT %d = {SQUARE} dot(%c, %p), {DOT}
    """)
    # Two at a time, what a product takes and what it makes: one has the room of the output.
    assert usage.temporaries == MIB
    kept = memory(f"""{P}
    %a = {SQUARE} dot(%p, %p), {DOT}
    %b = {SQUARE} dot(%a, %p), {DOT}
    %c = {SQUARE} dot(%b, %p), {DOT}
    ROOT %d = {SQUARE} dot(%c, %a), {DOT}
    """)
    assert kept.temporaries == 2 * MIB


def test_a_value_within_a_kernel_takes_no_room() -> None:
    usage = memory(f"""{P}
    %zero = f32[] constant(0)
    %b = f32[512,512,64] broadcast(%p), dimensions={{0,1}}
    %e = f32[512,512,64] exponential(%b)
    ROOT %s = {SQUARE} reduce(%e, %zero), dimensions={{2}}, to_apply=%sum
    """)
    assert usage.temporaries == 0


def test_the_scores_of_a_written_kernel_take_no_room() -> None:
    def attention(scope: str) -> Memory:
        named = f'metadata={{op_name="jit(f)/{scope}/dot_general"}}'
        return memory(f"""
        %q = f32[1024,64] parameter(0)
        %s = f32[1024,1024] dot(%q, %q), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{1}}, {named}
        %e = f32[1024,1024] exponential(%s), {named}
        ROOT %y = f32[1024,64] dot(%e, %q), {DOT}, {named}
        """)

    assert attention("kernel[flash_attention]").temporaries == 0
    assert attention("attention").temporaries >= 4 * MIB


def test_views_take_no_room_of_their_own() -> None:
    usage = memory(f"""{P}
    %a = {SQUARE} dot(%p, %p), {DOT}
    %b = f32[262144] bitcast(%a)
    %c = f32[262144] copy(%b)
    %d = {SQUARE} bitcast(%c)
    ROOT %e = {SQUARE} dot(%d, %p), {DOT}
    """)
    assert usage.temporaries == MIB


# Loops -------------------------------------------------------------------------------------------

CARRIED = f"(s32[], {SQUARE}, f32[10,512,512])"


def scanned() -> Memory:
    """Ten turns, of which each saves what it multiplies."""
    line, condition, body = counted_loop(
        10,
        f"""
        %c = {CARRIED} parameter(0)
        %i = s32[] get-tuple-element(%c), index=0
        %x = {SQUARE} get-tuple-element(%c), index=1
        %saved = f32[10,512,512] get-tuple-element(%c), index=2
        %one = s32[] constant(1)
        %zero = s32[] constant(0)
        %next = s32[] add(%i, %one)
        %row = f32[1,512,512] bitcast(%x)
        %kept = f32[10,512,512] dynamic-update-slice(%saved, %row, %i, %zero, %zero)
        %inner = {SQUARE} dot(%x, %x), {DOT}
        %y = {SQUARE} dot(%inner, %x), {DOT}, metadata={{op_name="jit(f)/while/body/layer/dot"}}
        ROOT %t = {CARRIED} tuple(%next, %y, %kept)
        """,
        CARRIED,
        "begin",
    )
    return memory(
        f"""{P}
        %i = s32[] constant(0)
        %nothing = f32[] constant(0)
        %stack = f32[10,512,512] broadcast(%nothing), dimensions={{}}, \
metadata={{op_name="jit(f)/blocks/broadcast"}}
        %first = {SQUARE} dot(%p, %p), {DOT}
        %begin = {CARRIED} tuple(%i, %first, %stack)
        {line}
        %x = {SQUARE} get-tuple-element(%loop), index=1
        %saved = f32[10,512,512] get-tuple-element(%loop), index=2
        %sum.1 = {SQUARE} reduce(%saved, %nothing), dimensions={{0}}, to_apply=%sum
        ROOT %y = {SQUARE} add(%x, %sum.1)
        """,
        condition,
        body,
    )


def test_a_loop_carries_on_what_it_was_given() -> None:
    usage = scanned()
    # The stack and the carried value once, however many turns; in a turn two products, of which
    # one has the room of the output; and the number of the turn.
    assert usage.temporaries == (10 + 1 + 1) * MIB + 4


def test_saved_activations_are_reported_as_the_largest() -> None:
    usage = scanned()
    assert usage.largest[0].bytes == 10 * MIB
    assert usage.largest[0].name == "blocks"
    assert [buffer.bytes for buffer in usage.largest] == sorted(
        (buffer.bytes for buffer in usage.largest), reverse=True
    )


def test_an_argument_may_be_the_largest() -> None:
    usage = memory("""
    %p = f32[4096,512] parameter(0), metadata={op_name="state['w']"}
    %q = f32[512,512] parameter(1), metadata={op_name="x"}
    ROOT %n = f32[512,512] negate(%q)
    """)
    assert usage.largest[0].name == "argument state['w']"
    assert usage.largest[0].bytes == 8 * MIB


def test_what_the_compiler_tells_is_taken_as_it_is() -> None:
    program = module(f"{P}\nROOT %n = {SQUARE} negate(%p)")
    usage = compiler_memory(
        program, {"arguments": 100, "outputs": 30, "aliased": 20, "temporaries": 7, "code": 5}
    )
    assert (usage.arguments, usage.outputs, usage.temporaries, usage.total) == (100, 10, 7, 117)
