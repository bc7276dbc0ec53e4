"""HLO modules for the tests of the cost model, written as the lines of their entry."""

from __future__ import annotations

from drumline.inspect.cost.kernels import FREE_OPCODES, Kernel, compiled_kernels, fuse
from drumline.inspect.hlo.text import Module, parse_module

SUM = """\
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %a_plus_b = f32[] add(%a, %b)
}
"""
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
X = "channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, use_global_device_ids=true"
"""The groups of the axis X of a mesh X=2,Y=4."""
Y = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true"
UP_Y = "channel_id=1, source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"


def module(lines: str, *other_computations: str, head: str = "num_partitions=8") -> Module:
    """Return a module from the lines of its entry and from complete other computations."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    other_text = "\n".join(other_computations)
    return parse_module(
        f"HloModule made, {head}\n\n{SUM}\n{other_text}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
    )


def computation(name: str, lines: str) -> str:
    """Return another computation that can be called."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    return f"%{name} () -> f32[] {{\n{body}\n}}\n"


def kernels_of(lines: str, *other_computations: str, on_chip: float = 0.0) -> list[Kernel]:
    """Return the kernels that do work, after fusion by the cost model."""
    parsed = module(lines, *other_computations)
    kernels = fuse(parsed.entry, parsed, on_chip)
    return [kernel for kernel in kernels if kernel.primary.opcode not in FREE_OPCODES]


def compiled_kernels_of(lines: str, *other_computations: str) -> list[Kernel]:
    """Return the kernels that do work in a program that its own compiler has fused."""
    parsed = module(lines, *other_computations)
    return [
        kernel
        for kernel in compiled_kernels(parsed.entry, parsed)
        if kernel.primary.opcode not in FREE_OPCODES
    ]


def only_kernel(kernels: list[Kernel]) -> Kernel:
    """Return the only kernel."""
    (kernel,) = kernels
    return kernel


def counted_loop(
    trip_count: int | None, body: str, carry_type: str, begin: str
) -> tuple[str, str, str]:
    """Return a loop's line, condition and body. With `None` turns the data decide the count."""
    bound = (
        f"s32[] constant({trip_count})"
        if trip_count is not None
        else "s32[] get-tuple-element(%c), index=0"
    )
    condition = computation(
        "condition",
        f"""
        %c = {carry_type} parameter(0)
        %i = s32[] get-tuple-element(%c), index=0
        %n = {bound}
        ROOT %less = pred[] compare(%i, %n), direction=LT
        """,
    )
    line = f"%loop = {carry_type} while(%{begin}), condition=%condition, body=%body"
    return line, condition, computation("body", body)
