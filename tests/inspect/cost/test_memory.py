"""The memory estimate of a device, in bytes, for small HLO programs."""

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


def test_a_result_in_the_buffer_of_a_donated_argument_needs_no_memory() -> None:
    lines = f"""{P}
    %q = f32[1024,512] parameter(1)
    %n = {SQUARE} negate(%p)
    %m = f32[1024,512] negate(%q)
    ROOT %t = ({SQUARE}, f32[1024,512]) tuple(%n, %m)
    """
    entry = "entry_computation_layout={()->f32[]}, num_partitions=1"
    assert memory(lines, head=entry).outputs == 3 * MIB
    partly_donated = memory(
        lines, head=f"input_output_alias={{ {{1}}: (1, {{}}, may-alias) }}, {entry}"
    )
    assert partly_donated.outputs == MIB
    alias = "{ {0}: (0, {}, may-alias), {1}: (1, {}, may-alias) }"
    fully_donated = memory(lines, head=f"input_output_alias={alias}, {entry}")
    assert fully_donated.outputs == 0
    assert fully_donated.total == 3 * MIB


TRAINING_STEP = f"""{P}
    %x = f32[512,2048] parameter(1)
    %h = f32[512,2048] dot(%p, %x), {DOT}
    %u = {SQUARE} dot(%h, %x), lhs_contracting_dims={{1}}, rhs_contracting_dims={{1}}
    ROOT %n = {SQUARE} subtract(%p, %u)
    """


def test_temporaries_come_beside_donated_arguments() -> None:
    entry = "entry_computation_layout={()->f32[]}, num_partitions=1"
    without_donation = memory(TRAINING_STEP, head=entry)
    donated = memory(
        TRAINING_STEP, head=f"input_output_alias={{ {{}}: (0, {{}}, may-alias) }}, {entry}"
    )
    # The activations exist before the new weights, but do not replace the old ones.
    assert (without_donation.arguments, without_donation.outputs, without_donation.temporaries) == (
        5 * MIB,
        MIB,
        4 * MIB,
    )
    assert (donated.arguments, donated.outputs, donated.temporaries) == (5 * MIB, 0, 4 * MIB)


def test_operands_of_a_kernel_live_until_it_ends() -> None:
    usage = memory(f"""
    %p = f32[512,2048] parameter(0)
    %q = f32[2048,512] parameter(1)
    %h = f32[512,2048] negate(%p)
    %y = {SQUARE} dot(%h, %q), {DOT}
    ROOT %n = {SQUARE} tanh(%y)
    """)
    assert usage.outputs + usage.temporaries == (4 + 1) * MIB


def test_values_live_until_their_last_use() -> None:
    usage = memory(f"""{P}
    %a = {SQUARE} dot(%p, %p), {DOT}
    %b = {SQUARE} dot(%a, %p), {DOT}
    %c = {SQUARE} dot(%b, %p), {DOT}
    ROOT %d = {SQUARE} dot(%c, %p), {DOT}
    """)
    # Two values are alive at a time, a matmul's operand and its result. One uses the output's
    # buffer.
    assert usage.temporaries == MIB
    with_late_use = memory(f"""{P}
    %a = {SQUARE} dot(%p, %p), {DOT}
    %b = {SQUARE} dot(%a, %p), {DOT}
    %c = {SQUARE} dot(%b, %p), {DOT}
    ROOT %d = {SQUARE} dot(%c, %a), {DOT}
    """)
    assert with_late_use.temporaries == 2 * MIB


def test_a_value_within_a_kernel_needs_no_memory() -> None:
    usage = memory(f"""{P}
    %zero = f32[] constant(0)
    %b = f32[512,512,64] broadcast(%p), dimensions={{0,1}}
    %e = f32[512,512,64] exponential(%b)
    ROOT %s = {SQUARE} reduce(%e, %zero), dimensions={{2}}, to_apply=%sum
    """)
    assert usage.temporaries == 0


def test_the_scores_of_a_named_kernel_need_no_memory() -> None:
    def attention(scope: str) -> Memory:
        metadata = f'metadata={{op_name="jit(f)/{scope}/dot_general"}}'
        return memory(f"""
        %q = f32[1024,64] parameter(0)
        %s = f32[1024,1024] dot(%q, %q), lhs_contracting_dims={{1}}, \
rhs_contracting_dims={{1}}, {metadata}
        %e = f32[1024,1024] exponential(%s), {metadata}
        ROOT %y = f32[1024,64] dot(%e, %q), {DOT}, {metadata}
        """)

    assert attention("kernel[flash_attention]").temporaries == 0
    assert attention("attention").temporaries >= 4 * MIB


def test_views_need_no_memory() -> None:
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


def scan_memory() -> Memory:
    """Return the memory of a loop with ten iterations, each of which saves its operand."""
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


def test_a_loop_reuses_its_carried_buffers() -> None:
    usage = scan_memory()
    # The stack and the carried value count once. An iteration has two matmuls, one of them in the
    # output's buffer, and the iteration number.
    assert usage.temporaries == (10 + 1 + 1) * MIB + 4


def test_saved_activations_are_reported_as_the_largest() -> None:
    usage = scan_memory()
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


def test_the_compilers_own_memory_figures_are_used_unchanged() -> None:
    program = module(f"{P}\nROOT %n = {SQUARE} negate(%p)")
    usage = compiler_memory(
        program, {"arguments": 100, "outputs": 30, "aliased": 20, "temporaries": 7, "code": 5}
    )
    assert (usage.arguments, usage.outputs, usage.temporaries, usage.total) == (100, 10, 7, 117)
