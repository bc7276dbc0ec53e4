"""HLO modules for the cost model's tests, written by the lines of their entry."""

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


def module(lines: str, *others: str, head: str = "num_partitions=8") -> Module:
    """A module of the lines of its entry, and of other computations in full."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    called = "\n".join(others)
    return parse_module(
        f"HloModule made, {head}\n\n{SUM}\n{called}\nENTRY %main () -> f32[] {{\n{body}\n}}\n"
    )


def computation(name: str, lines: str) -> str:
    """Another computation, to be called."""
    body = "\n".join(f"  {line.strip()}" for line in lines.strip().splitlines())
    return f"%{name} () -> f32[] {{\n{body}\n}}\n"


def kernels_of(lines: str, *others: str, on_chip: float = 0.0) -> list[Kernel]:
    """The kernels that do something, as they are fused here."""
    made = module(lines, *others)
    kernels = fuse(made.entry, made, on_chip)
    return [kernel for kernel in kernels if kernel.primary.opcode not in FREE_OPCODES]


def compiled_kernels_of(lines: str, *others: str) -> list[Kernel]:
    """The kernels that do something, of a program that its own compiler has fused."""
    made = module(lines, *others)
    return [
        one for one in compiled_kernels(made.entry, made) if one.primary.opcode not in FREE_OPCODES
    ]


def only(kernels: list[Kernel]) -> Kernel:
    """The one kernel that there is."""
    (kernel,) = kernels
    return kernel


def counted_loop(turns: int | None, body: str, carried: str, begin: str) -> tuple[str, str, str]:
    """The line of a loop, its condition and its body; None turns depend on the data."""
    bound = (
        f"s32[] constant({turns})" if turns is not None else "s32[] get-tuple-element(%c), index=0"
    )
    condition = computation(
        "condition",
        f"""
        %c = {carried} parameter(0)
        %i = s32[] get-tuple-element(%c), index=0
        %n = {bound}
        ROOT %less = pred[] compare(%i, %n), direction=LT
        """,
    )
    line = f"%loop = {carried} while(%{begin}), condition=%condition, body=%body"
    return line, condition, computation("body", body)
