"""Overlap of transfers and matmuls, in lowered programs and in the benchmark's reading of
schedules.
"""

from __future__ import annotations

import re
from itertools import combinations
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

from tests.parallel.rings.benchmarks import benchmark
from tests.parallel.rings.layouts import BY_NAME, LAYOUTS, abstract, mesh_of, shape, sharded

SCHEDULED = """\
HloModule jit_f, is_scheduled=true, entry_computation_layout={(bf16[8,4]{1,0})->bf16[8,4]{1,0}}

%fused_add (p.0: f32[8,4], p.1: f32[8,4]) -> f32[8,4] {
  %p.0 = f32[8,4]{1,0} parameter(0)
  %p.1 = f32[8,4]{1,0} parameter(1)
  ROOT %add.1 = f32[8,4]{1,0} add(%p.0, %p.1)
}

%gathered (p: bf16[4,4]) -> bf16[8,4] {
  %p = bf16[4,4]{1,0} parameter(0)
  ROOT %all-gather.1 = bf16[8,4]{1,0} all-gather(%p), dimensions={0}
}

%inside (q.0: bf16[8,4], q.1: bf16[4,4]) -> f32[8,4] {
  %q.0 = bf16[8,4]{1,0} parameter(0)
  %q.1 = bf16[4,4]{1,0} parameter(1)
  ROOT %dot.9 = f32[8,4]{1,0} dot(%q.0, %q.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: bf16[8,4], w: bf16[4,4]) -> f32[8,4] {
  %a = bf16[8,4]{1,0} parameter(0)
  %w = bf16[4,4]{1,0} parameter(1)
  %collective-permute-start = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) collective-permute-start(%a)
  %collective-permute-start.1 = (bf16[8,4]{1,0}, bf16[8,4]{1,0}) collective-permute-start(%a)
  %fusion.1 = f32[8,4]{1,0} fusion(%a, %w), kind=kCustom, calls=%inside
  %collective-permute-done.1 = bf16[8,4]{1,0} collective-permute-done(%collective-permute-start.1)
  %cublas.2 = (f32[8,4]{1,0}, s8[8]{0}) custom-call(%a, %w), custom_call_target="__cublas$gemm"
  %collective-permute-done = bf16[8,4]{1,0} collective-permute-done(%collective-permute-start)
  %start.3 = ((bf16[4,4]{1,0}), bf16[8,4]{1,0}) async-start(%w), calls=%gathered
  %fusion.2 = f32[8,4]{1,0} fusion(%fusion.1, %fusion.1), kind=kLoop, calls=%fused_add
  %done.3 = bf16[8,4]{1,0} async-done(%start.3)
  ROOT %all-reduce.4 = f32[8,4]{1,0} all-reduce(%fusion.2), to_apply=%fused_add
}
"""


_OPERATION = re.compile(r"^\s*(%\w+)(?::\d+)? = (\S+) (.*)$")


class Contraction(NamedTuple):
    """A matmul in a lowered program."""

    name: str
    operands: set[str]
    waits_for: set[str]


def matmuls_of(text: str) -> list[Contraction]:
    """Return the matmuls in order, each with the matmuls that it depends on."""
    contractions: list[Contraction] = []
    dependencies: dict[str, set[str]] = {}
    for line in text.splitlines():
        if not (match := _OPERATION.match(line)):
            continue
        name, operation, rest = match.groups()
        operands = set(re.findall(r"%\w+(?:#\d+)?", rest))
        dependencies[name] = set().union(*(dependencies.get(o.split("#")[0], ()) for o in operands))
        if operation == "stablehlo.dot_general":
            contractions.append(Contraction(name, operands, set(dependencies[name])))
            dependencies[name].add(name)
    return contractions


@pytest.mark.parametrize("direction", ["one", "both"])
def test_matmuls_of_unrolled_steps_cannot_be_merged(direction: str) -> None:
    # Compilers merge matmuls that share an operand unless one depends on the other. A transfer then
    # has no matmul left to overlap with.
    mesh, other_axes = mesh_of((4,), 0)
    sizes = {"b": 2, "s": 16, "d": 32, "f": 64}
    for layout in LAYOUTS:
        function = sharded(layout, mesh, other_axes, direction=direction, loop="unrolled")
        arguments = [abstract(shape(d, 1, sizes), jnp.float32) for d in layout.operands]
        contractions = matmuls_of(jax.jit(function).lower(*arguments).as_text())
        assert len(contractions) >= 4 * (1 if direction == "one" else 2)
        for earlier, later in combinations(contractions, 2):
            assert earlier.name in later.waits_for or not earlier.operands & later.operands, (
                layout.name
            )


@pytest.fixture(scope="module")
def reader() -> ModuleType:
    return benchmark("overlap_h200")


def test_matmuls_between_start_and_done_are_counted(reader: ModuleType) -> None:
    transfers = [(transfer.kind, transfer.beside) for transfer in reader.transfers(SCHEDULED)]
    assert transfers == [
        ("collective-permute", 2),
        ("collective-permute", 1),
        ("all-gather", 0),
        ("all-reduce", None),
    ]
    matmul_count, summary = reader.summary(SCHEDULED)
    assert matmul_count == "2"
    assert (
        "collective-permute: 2 asynchronous, 2 with multiplications beside them ([1, 2])" in summary
    )


def test_emulated_devices_have_only_blocking_permutes(reader: ModuleType) -> None:
    mesh, other_axes = mesh_of((4,), 0)
    layout = BY_NAME["gather contraction"]
    sizes = {"b": 2, "s": 16, "d": 32, "f": 64}
    arguments = [abstract(shape(d, 1, sizes), jnp.float32) for d in layout.operands]
    function = sharded(layout, mesh, other_axes, direction="both", loop="unrolled")
    text = jax.jit(function).lower(*arguments).compile().as_text()
    transfers = [(transfer.kind, transfer.beside) for transfer in reader.transfers(text)]
    assert transfers == [("collective-permute", None)] * 6
