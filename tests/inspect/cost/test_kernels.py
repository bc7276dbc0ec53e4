"""The grouping of operations into kernels, and their FLOPs and bytes, for small HLO programs."""

from __future__ import annotations

import pytest

from drumline.inspect.cost.machines import chip_constants, parse_machine
from drumline.inspect.cost.work import Matmul
from tests.inspect.cost.modules import (
    DOT,
    compiled_kernels_of,
    computation,
    kernels_of,
    only_kernel,
)

# Matmuls -----------------------------------------------------------------------------------------


def test_a_matmul() -> None:
    kernel = only_kernel(
        kernels_of(f"""
        %p = bf16[256,512] parameter(0)
        %q = bf16[512,128] parameter(1)
        ROOT %y = bf16[256,128] dot(%p, %q), {DOT}
        """)
    )
    assert kernel.work.matmuls == (Matmul(1, 256, 512, 128, "bf16"),)
    assert kernel.work.flops == 2 * 256 * 512 * 128
    assert kernel.work.bytes_read == 2 * (256 * 512 + 512 * 128)
    assert kernel.work.bytes_written == 2 * 256 * 128


def test_a_matmul_of_many_matrices() -> None:
    kernel = only_kernel(
        kernels_of("""
        %p = f32[8,64,32] parameter(0)
        %q = f32[8,16,32] parameter(1)
        ROOT %y = f32[8,64,16] dot(%p, %q), lhs_batch_dims={0}, rhs_batch_dims={0}, \
lhs_contracting_dims={2}, rhs_contracting_dims={2}
        """)
    )
    assert kernel.work.matmuls == (Matmul(8, 64, 32, 16, "f32"),)


def test_a_matmul_over_several_dimensions() -> None:
    kernel = only_kernel(
        kernels_of("""
        %p = bf16[4,8,16,32] parameter(0)
        %q = bf16[16,32,64] parameter(1)
        ROOT %y = bf16[4,8,64] dot(%p, %q), lhs_contracting_dims={2,3}, rhs_contracting_dims={0,1}
        """)
    )
    assert kernel.work.matmuls == (Matmul(1, 32, 512, 64, "bf16"),)


@pytest.mark.parametrize(
    ("left", "right", "result", "labels", "flops"),
    [
        # Forward: 3×3 over 16 input features at each of 2·8·8 positions, with 32 output features.
        ("2,8,8,16", "3,3,16,32", "2,8,8,32", "b01f_01io->b01f", 2 * (128 * 32) * (9 * 16)),
        # Depthwise: the kernel has one input feature for each output feature.
        ("2,8,8,16", "3,3,1,16", "2,8,8,16", "b01f_01io->b01f", 2 * (128 * 16) * 9),
        # The gradient of a kernel sums over the batch.
        ("16,8,8,2", "2,8,8,32", "3,3,16,32", "f01b_i01o->01bf", 2 * (9 * 16 * 32) * 128),
    ],
)
def test_a_convolution(left: str, right: str, result: str, labels: str, flops: int) -> None:
    kernel = only_kernel(
        kernels_of(f"""
        %p = bf16[{left}] parameter(0)
        %q = bf16[{right}] parameter(1)
        ROOT %y = bf16[{result}] convolution(%p, %q), window={{size=3x3 pad=1_1x1_1}}, \
dim_labels={labels}
        """)
    )
    assert kernel.work.flops == flops


def test_a_matmul_over_heads_as_a_tpus_compiler_writes_it() -> None:
    kernel = only_kernel(
        kernels_of("""
        %p = bf16[32,64,1] parameter(0)
        %q = bf16[64,16,8] parameter(1)
        ROOT %y = bf16[32,16,8] convolution(%p, %q), window={size=16 pad=15_15 rhs_reversal=1}, \
dim_labels=bf0_i0o->b0f
        """)
    )
    assert kernel.work.flops == 2 * 32 * 64 * (16 * 8)


@pytest.mark.parametrize(
    ("precision", "passes"), [("", 1), ("high,high", 3), ("highest,highest", 6)]
)
def test_float32_of_more_precision_takes_several_passes(precision: str, passes: int) -> None:
    precision_text = f", operand_precision={{{precision}}}" if precision else ""
    kernel = only_kernel(
        kernels_of(f"""
        %p = f32[2048,2048] parameter(0)
        %q = f32[2048,2048] parameter(1)
        ROOT %y = f32[2048,2048] dot(%p, %q), {DOT}{precision_text}
        """)
    )
    (matmul,) = kernel.work.matmuls
    assert matmul.speed(parse_machine("v5litepod-1")) == pytest.approx(1 / passes)
    # A GPU's float32 is TF32, at half the speed of bfloat16.
    assert matmul.speed(parse_machine("H200")) == pytest.approx(0.5 / passes)
    assert matmul.flops == 2 * 2048**3


def test_bfloat16_takes_one_pass_at_any_requested_precision() -> None:
    kernel = only_kernel(
        kernels_of(f"""
        %p = bf16[256,256] parameter(0)
        ROOT %y = bf16[256,256] dot(%p, %p), {DOT}, operand_precision={{highest,highest}}
        """)
    )
    assert kernel.work.matmuls[0].speed(parse_machine("v5litepod-1")) == 1
    assert kernel.work.bytes_read == 2 * 256 * 256, "an operand that is used twice is read once"


@pytest.mark.parametrize(
    ("machine", "int8", "fp8"),
    [
        ("v2-8", 1, 1),
        ("v4-8", 1, 1),
        ("v5litepod-1", 2, 1),
        ("v5p-8", 2, 1),
        ("v6e-1", 2, 1),
        ("tpu7x-8", 1, 2),
        ("V100", 1, 1),
        ("A100", 2, 1),
        ("H200", 2, 2),
        ("B200", 2, 2),
    ],
)
def test_eight_bit_matmuls_run_at_the_rate_of_their_type(
    machine: str, int8: float, fp8: float
) -> None:
    for dtypes, expected in ((("s8", "u8", "s4"), int8), (("f8e4m3fn", "f8e5m2"), fp8)):
        for dtype in dtypes:
            speed = Matmul(1, 8, 8, 8, dtype).speed(parse_machine(machine))
            assert speed == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(("types", "dtype"), [(("s8", "bf16"), "bf16"), (("f32", "s8"), "f32")])
def test_a_matmul_of_two_types_runs_at_the_rate_of_the_wider(
    types: tuple[str, str], dtype: str
) -> None:
    for left, right in (types, types[::-1]):
        kernel = only_kernel(
            kernels_of(f"""
            %p = {left}[256,256] parameter(0)
            %q = {right}[256,256] parameter(1)
            ROOT %y = f32[256,256] dot(%p, %q), {DOT}
            """)
        )
        assert kernel.work.matmuls[0].dtype == dtype


def test_the_unit_multiplies_whole_tiles() -> None:
    constants = chip_constants("v5e")  # 128×128, rows of 8
    assert Matmul(1, 256, 128, 512, "bf16").padded_flops(constants) == 2 * 256 * 128 * 512
    # The stationary operand uses whole tiles, the moving operand eight rows at a time.
    assert Matmul(1, 130, 300, 300, "bf16").padded_flops(constants) == 2 * 136 * 384 * 384
    assert Matmul(1, 1, 4096, 4096, "bf16").padded_flops(constants) == 2 * 8 * 4096 * 4096


# Fusion into kernels -----------------------------------------------------------------------------


def test_a_chain_of_elementwise_operations_is_one_kernel() -> None:
    kernel = only_kernel(
        kernels_of("""
        %p = f32[1024,1024] parameter(0)
        %e = f32[1024,1024] exponential(%p)
        %m = f32[1024,1024] multiply(%e, %p)
        ROOT %y = f32[1024,1024] add(%m, %e)
        """)
    )
    elements = 1024 * 1024
    assert kernel.work.bytes_read == 4 * elements, "an operand of two operations is read once"
    assert kernel.work.bytes_written == 4 * elements
    assert kernel.work.vector_ops == (8 + 1 + 1) * elements
    assert kernel.work.flops == 0


def test_a_sum_includes_its_elementwise_operand() -> None:
    kernel = only_kernel(
        kernels_of("""
        %p = f32[1024,512] parameter(0)
        %zero = f32[] constant(0)
        %e = f32[1024,512] multiply(%p, %p)
        ROOT %y = f32[1024] reduce(%e, %zero), dimensions={1}, to_apply=%sum
        """)
    )
    assert kernel.primary.opcode == "reduce"
    assert kernel.work.bytes_read == 4 * 1024 * 512 + 4
    assert kernel.work.bytes_written == 4 * 1024


def test_a_softmax_is_two_kernels_that_both_compute_the_exponential() -> None:
    kernels = kernels_of("""
    %p = f32[1024,512] parameter(0)
    %zero = f32[] constant(0)
    %m = f32[1024,512] multiply(%p, %p)
    %s = f32[1024] reduce(%m, %zero), dimensions={1}, to_apply=%sum
    %b = f32[1024,512] broadcast(%s), dimensions={0}
    ROOT %y = f32[1024,512] divide(%m, %b)
    """)
    assert [kernel.primary.opcode for kernel in kernels] == ["reduce", "divide"]
    # The product is cheap enough to compute twice, so it does not go through memory.
    assert [kernel.work.bytes_written for kernel in kernels] == [4 * 1024, 4 * 1024 * 512]
    assert kernels[1].work.bytes_read == 4 * 1024 * 512 + 4 * 1024


def test_a_costly_value_that_two_kernels_need_is_computed_once() -> None:
    kernels = kernels_of("""
    %p = f32[1024,512] parameter(0)
    %zero = f32[] constant(0)
    %e = f32[1024,512] exponential(%p)
    %s = f32[1024] reduce(%e, %zero), dimensions={1}, to_apply=%sum
    %b = f32[1024,512] broadcast(%s), dimensions={0}
    ROOT %y = f32[1024,512] divide(%e, %b)
    """)
    assert [kernel.primary.opcode for kernel in kernels] == ["exponential", "reduce", "divide"]
    assert kernels[0].work.bytes_written == 4 * 1024 * 512


def test_a_value_that_fits_on_the_chip_does_not_go_through_memory() -> None:
    lines = f"""
    %p = bf16[256,512] parameter(0)
    %q = bf16[512,128] parameter(1)
    %r = bf16[128,64] parameter(2)
    %h = bf16[256,128] dot(%p, %q), {DOT}
    ROOT %y = bf16[256,64] dot(%h, %r), {DOT}
    """
    size = 2 * 256 * 128
    for capacity, memory_bytes in ((0.0, size), (float(size), 0)):
        first, second = kernels_of(lines, on_chip=capacity)
        assert first.work.bytes_written == memory_bytes
        assert second.work.bytes_read == memory_bytes + 2 * 128 * 64


def test_an_epilogue_belongs_to_its_matmul() -> None:
    kernel = only_kernel(
        kernels_of(f"""
        %p = bf16[256,512] parameter(0)
        %q = bf16[512,128] parameter(1)
        %bias = bf16[128] parameter(2)
        %y = bf16[256,128] dot(%p, %q), {DOT}
        %b = bf16[256,128] broadcast(%bias), dimensions={{1}}
        %s = bf16[256,128] add(%y, %b)
        ROOT %t = bf16[256,128] tanh(%s)
        """)
    )
    assert kernel.primary.opcode == "dot"
    assert kernel.work.bytes_read == 2 * (256 * 512 + 512 * 128 + 128)
    assert kernel.work.bytes_written == 2 * 256 * 128
    assert kernel.work.vector_ops == (1 + 12) * 256 * 128


def test_conversions_of_operands_belong_to_the_matmul() -> None:
    kernel = only_kernel(
        kernels_of(f"""
        %p = f32[256,512] parameter(0)
        %q = bf16[128,512] parameter(1)
        %c = bf16[256,512] convert(%p)
        %t = bf16[512,128] transpose(%q), dimensions={{1,0}}
        ROOT %y = bf16[256,128] dot(%c, %t), {DOT}
        """)
    )
    assert kernel.work.bytes_read == 4 * 256 * 512 + 2 * 512 * 128


def test_costly_work_on_an_operand_runs_before_the_matmul() -> None:
    kernels = kernels_of(f"""
    %p = bf16[256,512] parameter(0)
    %q = bf16[512,128] parameter(1)
    %e = bf16[256,512] exponential(%p)
    ROOT %y = bf16[256,128] dot(%e, %q), {DOT}
    """)
    assert [kernel.primary.opcode for kernel in kernels] == ["exponential", "dot"]
    assert kernels[0].work.bytes_written == 2 * 256 * 512


def test_a_sum_over_a_matmul_is_a_separate_kernel() -> None:
    kernels = kernels_of(f"""
    %p = f32[256,512] parameter(0)
    %q = f32[512,128] parameter(1)
    %zero = f32[] constant(0)
    %y = f32[256,128] dot(%p, %q), {DOT}
    ROOT %s = f32[256] reduce(%y, %zero), dimensions={{1}}, to_apply=%sum
    """)
    assert [kernel.primary.opcode for kernel in kernels] == ["dot", "reduce"]


def test_each_matmul_of_a_running_sum_adds_itself() -> None:
    kernels = kernels_of(f"""
    %p = f32[256,512] parameter(0)
    %q = f32[512,128] parameter(1)
    %r = f32[512,128] parameter(2)
    %s = f32[512,128] parameter(3)
    %a = f32[256,128] dot(%p, %q), {DOT}
    %b = f32[256,128] dot(%p, %r), {DOT}
    %c = f32[256,128] dot(%p, %s), {DOT}
    %ab = f32[256,128] add(%a, %b)
    ROOT %abc = f32[256,128] add(%ab, %c)
    """)
    assert [len(kernel.work.matmuls) for kernel in kernels] == [1, 1, 1]
    assert [
        sum(instruction.opcode == "add" for instruction in k.instructions) for k in kernels
    ] == [0, 1, 1]
    out = 4 * 256 * 128
    operand_bytes = 4 * (256 * 512 + 512 * 128)
    assert [kernel.work.bytes_read for kernel in kernels] == [
        operand_bytes,
        operand_bytes + out,
        operand_bytes + out,
    ]
    assert all(kernel.work.bytes_written == out for kernel in kernels)


# Slices and updates ------------------------------------------------------------------------------


def test_a_slice_reads_only_itself() -> None:
    kernel = only_kernel(
        kernels_of("""
        %p = f32[64,1024,1024] parameter(0)
        %i = s32[] parameter(1)
        %zero = s32[] constant(0)
        %s = f32[1,1024,1024] dynamic-slice(%p, %i, %zero, %zero), \
dynamic_slice_sizes={1,1024,1024}
        ROOT %n = f32[1,1024,1024] negate(%s)
        """)
    )
    size = 4 * 1024 * 1024
    assert kernel.work.bytes_read == pytest.approx(size, abs=16)
    assert kernel.work.bytes_written == size


def test_an_update_writes_only_itself() -> None:
    kernel = only_kernel(
        kernels_of("""
        %p = f32[64,1024,1024] parameter(0)
        %u = f32[1,1024,1024] parameter(1)
        %i = s32[] parameter(2)
        %zero = s32[] constant(0)
        %n = f32[1,1024,1024] negate(%u)
        ROOT %d = f32[64,1024,1024] dynamic-update-slice(%p, %n, %i, %zero, %zero)
        """)
    )
    size = 4 * 1024 * 1024
    assert kernel.work.bytes_read == pytest.approx(size, abs=16)
    assert kernel.work.bytes_written == size


FUSED_SLICE = computation(
    "sliced",
    """
    %a = f32[64,1024] parameter(0)
    %i = s32[] parameter(1)
    %zero = s32[] constant(0)
    %s = f32[1,1024] dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,1024}
    ROOT %n = f32[1,1024] negate(%s)
    """,
)
FUSED_UPDATE = computation(
    "updated",
    """
    %a = f32[64,1024] parameter(0)
    %u = f32[1,1024] parameter(1)
    %i = s32[] parameter(2)
    %zero = s32[] constant(0)
    ROOT %d = f32[64,1024] dynamic-update-slice(%a, %u, %i, %zero)
    """,
)


def test_a_compiled_fusion_reads_and_writes_as_its_slices_do() -> None:
    sliced, updated = compiled_kernels_of(
        """
        %p = f32[64,1024] parameter(0)
        %i = s32[] parameter(1)
        %s = f32[1,1024] fusion(%p, %i), kind=kLoop, calls=%sliced
        ROOT %d = f32[64,1024] fusion(%p, %s, %i), kind=kLoop, calls=%updated
        """,
        FUSED_SLICE,
        FUSED_UPDATE,
    )
    row = 4 * 1024
    assert (sliced.work.bytes_read, sliced.work.bytes_written) == (row + 4, row)
    assert (updated.work.bytes_read, updated.work.bytes_written) == (row + 4, row)


def test_values_placed_on_the_chip_cost_no_bandwidth() -> None:
    kernel = only_kernel(
        compiled_kernels_of(f"""
        %p = bf16[256,512]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
        %q = bf16[512,128]{{1,0:T(8,128)(2,1)}} parameter(1)
        ROOT %y = bf16[256,128]{{1,0:T(8,128)(2,1)S(1)}} dot(%p, %q), {DOT}
        """)
    )
    assert (kernel.work.bytes_read, kernel.work.bytes_written) == (2 * 512 * 128, 0)
