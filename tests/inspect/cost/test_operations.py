"""User-written kernels, a GPU's libraries, and the seconds of single kernels."""

from __future__ import annotations

import pytest

from drumline.inspect.cost.kernels import Kernel, kernel_cost
from drumline.inspect.cost.machines import parse_machine
from drumline.inspect.cost.work import Matmul
from tests.inspect.cost.modules import DOT, compiled_kernels_of, kernels_of, only_kernel

# Named kernels -----------------------------------------------------------------------------------


def attention(scope: str) -> list[Kernel]:
    metadata = f'metadata={{op_name="jit(f)/{scope}/dot_general"}}'
    batch = "lhs_batch_dims={0}, rhs_batch_dims={0}"
    return kernels_of(f"""
    %q = bf16[8,1024,64] parameter(0)
    %k = bf16[8,1024,64] parameter(1)
    %v = bf16[8,1024,64] parameter(2)
    %s = f32[8,1024,1024] dot(%q, %k), {batch}, lhs_contracting_dims={{2}}, \
rhs_contracting_dims={{2}}, {metadata}
    %e = f32[8,1024,1024] exponential(%s), {metadata}
    %p = bf16[8,1024,1024] convert(%e), {metadata}
    ROOT %y = bf16[8,1024,64] dot(%p, %v), {batch}, lhs_contracting_dims={{2}}, \
rhs_contracting_dims={{1}}, {metadata}
    """)


def test_values_within_a_named_kernel_stay_on_the_chip() -> None:
    kernels = attention("kernel[flash_attention]")
    assert {kernel.scope for kernel in kernels} == {"flash_attention"}
    size = 2 * 8 * 1024 * 64
    assert sum(kernel.work.bytes_read for kernel in kernels) == 3 * size
    assert sum(kernel.work.bytes_written for kernel in kernels) == size
    assert sum(kernel.work.flops for kernel in kernels) == 2 * 2 * 8 * 1024 * 1024 * 64


def test_a_named_kernel_declares_its_fraction_of_the_work() -> None:
    full_work, half_work = (
        attention("kernel[flash_attention]"),
        attention("kernel[flash_attention work=0.5]"),
    )
    for before, after in zip(full_work, half_work, strict=True):
        assert after.work.flops == before.work.flops / 2
        assert after.work.vector_ops == before.work.vector_ops / 2
        assert after.work.bytes == before.work.bytes


def test_without_the_scope_the_scores_go_through_memory() -> None:
    kernels = attention("attention")
    assert not any(kernel.scope for kernel in kernels)
    assert sum(kernel.work.bytes for kernel in kernels) > 2 * 4 * 8 * 1024 * 1024


# A GPU's libraries -------------------------------------------------------------------------------


def test_a_library_s_matmul() -> None:
    kernel = only_kernel(
        compiled_kernels_of("""
        %p = bf16[256,512] parameter(0)
        %q = bf16[512,128] parameter(1)
        ROOT %y = (bf16[256,128], s8[1024]) custom-call(%p, %q), \
custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":\
{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[],\
"rhs_batch_dimensions":[]}}}
        """)
    )
    assert kernel.work.matmuls == (Matmul(1, 256, 512, 128, "bf16"),)
    assert kernel.work.bytes_read == 2 * (256 * 512 + 512 * 128)


def test_a_library_s_matmul_of_many_matrices() -> None:
    kernel = only_kernel(
        compiled_kernels_of("""
        %p = bf16[8,64,32] parameter(0)
        %q = bf16[8,32,16] parameter(1)
        ROOT %y = (bf16[8,64,16], s8[1024]) custom-call(%p, %q), \
custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":\
{"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],\
"lhs_batch_dimensions":["0"],"rhs_batch_dimensions":["0"]}}}
        """)
    )
    assert kernel.work.matmuls == (Matmul(8, 64, 32, 16, "bf16"),)


@pytest.mark.parametrize(
    ("target", "mask", "flops"),
    [
        ("__cudnn$fmhaSoftmax", "NO_MASK", 2 * 2 * 4 * 12 * 1024 * 1024 * 64),
        ("__cudnn$fmhaSoftmax", "CAUSAL", 2 * 4 * 12 * 1024 * 1024 * 64),
        ("__cudnn$fmhaSoftmaxBackward", "NO_MASK", 5 * 2 * 4 * 12 * 1024 * 1024 * 64),
    ],
)
def test_a_library_s_attention(target: str, mask: str, flops: int) -> None:
    kernel = only_kernel(
        compiled_kernels_of(f"""
        %q = bf16[4,1024,12,64] parameter(0)
        %k = bf16[4,1024,12,64] parameter(1)
        %v = bf16[4,1024,12,64] parameter(2)
        ROOT %y = (bf16[4,12,1024,64], u8[0]) custom-call(%q, %k, %v), \
custom_call_target="{target}", backend_config={{"cudnn_fmha_backend_config":\
{{"mask_type":"{mask}"}}}}
        """)
    )
    assert kernel.work.flops == flops
    assert all(matmul.fused_attention for matmul in kernel.work.matmuls)


# Seconds -----------------------------------------------------------------------------------------


def test_a_large_matmul_is_bound_by_compute() -> None:
    kernel = only_kernel(
        kernels_of(f"""
        %p = bf16[8192,8192] parameter(0)
        ROOT %y = bf16[8192,8192] dot(%p, %p), {DOT}
        """)
    )
    machine = parse_machine("v5litepod-8")
    cost = kernel_cost(kernel, machine, scheduled=False)
    multiplying = 2 * 8192**3 / (1.97e14 * 0.98)
    loading = 2 * 2 * 8192**2 / (8.2e11 * 0.92)
    assert cost.bound == "compute"
    assert cost.kind == "matmul"
    assert cost.seconds == pytest.approx(multiplying + 0.25 * loading + 0.3e-6)


def test_an_addition_is_bound_by_memory() -> None:
    kernel = only_kernel(
        kernels_of("""
        %p = f32[8192,8192] parameter(0)
        ROOT %y = f32[8192,8192] add(%p, %p)
        """)
    )
    cost = kernel_cost(kernel, parse_machine("v5litepod-8"), scheduled=False)
    loading = 2 * 4 * 8192**2 / (8.2e11 * 0.92)
    computing = 8192**2 / (4096 * 1.5e9)
    assert cost.bound == "memory"
    assert cost.kind == "elementwise"
    assert cost.seconds == pytest.approx(loading + 0.25 * computing + 0.3e-6)


def test_a_small_operation_is_bound_by_overhead_and_a_tiny_one_is_free() -> None:
    for size, bound in (("64,64", "overhead"), ("8", "")):
        kernel = only_kernel(
            kernels_of(f"""
            %p = f32[{size}] parameter(0)
            ROOT %y = f32[{size}] add(%p, %p)
            """)
        )
        cost = kernel_cost(kernel, parse_machine("v5litepod-8"), scheduled=False)
        assert cost.bound == bound
        assert (cost.seconds > 0) == bool(bound)


def test_recomputed_operations_are_marked() -> None:
    kernel = only_kernel(
        kernels_of(f"""
        %p = bf16[256,256] parameter(0)
        ROOT %y = bf16[256,256] dot(%p, %p), {DOT}, \
metadata={{op_name="jit(f)/transpose(jvp)/rematted_computation/dot_general"}}
        """)
    )
    assert kernel_cost(kernel, parse_machine("v5litepod-8"), scheduled=False).recomputed
