"""Small HLO modules in the forms that compilers write, with their meaning.

Device groups, asynchronous collectives, loops and source lines have different forms in different
compilers and versions. Their meaning is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tests.inspect.expected import (
    Expected,
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
)


@dataclass(frozen=True)
class TextCollective:
    """A collective of the text, with its other properties in the text."""

    collective: Expected
    at_least: bool = False
    source: str | None = None
    """The source line, or None if the text has none."""
    scopes: tuple[str, ...] = ()
    asynchronous: bool = False
    between: tuple[str, ...] = ()
    """The operations that overlap with the collective, in the order of the text."""


@dataclass(frozen=True)
class Text:
    """A module, its mesh with devices numbered row by row, and its communication."""

    name: str
    mesh: Mapping[str, int]
    module: str
    collectives: tuple[TextCollective, ...]


FLAT = {"X": 8}
GRID = {"X": 2, "Y": 4}
TALL = {"X": 4, "Y": 2}
CUBE = {"X": 2, "Y": 2, "Z": 2}

SUM = """\
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %a_plus_b = f32[] add(%a, %b)
}
"""
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"


def _reduce_module(groups: str) -> str:
    """Return a module that reduces a kilobyte within the groups."""
    return f"""\
HloModule reduced, is_scheduled=true, num_partitions=8

{SUM}
ENTRY %main (p: f32[16,16]) -> f32[16,16] {{
  %p = f32[16,16]{{1,0}} parameter(0)
  ROOT %all-reduce.1 = f32[16,16]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, \
use_global_device_ids=true, to_apply=%sum
}}
"""


def _groups(groups: str, mesh: Mapping[str, int], axes: str, devices: int) -> Text:
    collectives = (TextCollective(all_reduce(axes, devices, 1024)),)
    return Text(
        f"groups {groups} on {tuple(mesh.values())}", mesh, _reduce_module(groups), collectives
    )


GROUPS = (
    # Explicit lists.
    _groups("{{0,1,2,3,4,5,6,7}}", FLAT, "X", 8),
    _groups("{{0,1,2,3,4,5,6,7}}", GRID, "XY", 8),
    _groups("{{0,1,2,3},{4,5,6,7}}", GRID, "Y", 4),
    _groups("{{0,4},{1,5},{2,6},{3,7}}", GRID, "X", 2),
    _groups("{{0,4,1,5},{2,6,3,7}}", CUBE, "XZ", 4),
    _groups("{{4,0},{5,1},{6,2},{7,3}}", GRID, "X", 2),
    _groups("{}", GRID, "XY", 8),
    # Iota form: the number and size of the groups, of all numbers in a shape with permuted
    # dimensions.
    _groups("[2,4]<=[8]", GRID, "Y", 4),
    _groups("[1,8]<=[8]", FLAT, "X", 8),
    _groups("[4,2]<=[2,4]T(1,0)", GRID, "X", 2),
    _groups("[2,4]<=[4,2]T(1,0)", TALL, "X", 4),
    _groups("[4,2]<=[2,2,2]T(0,2,1)", CUBE, "Y", 2),
    _groups("[2,4]<=[2,2,2]T(1,0,2)", CUBE, "XZ", 4),
    # Axes of another mesh than the user's. Only the devices determine the user's axes.
    _groups("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", GRID, "Y", 4),
    _groups("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", GRID, "X", 2),
    _groups("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", GRID, "XY", 8),
    _groups("mesh['axis_0'=8,'axis_1'=1] {'axis_0'}", GRID, "XY", 8),
    _groups("mesh['Y'=2,'X'=4] {'X'}", GRID, "Y", 4),
    _groups("mesh['a'=2,'b'=2,'c'=2] {'a','c'}", CUBE, "XZ", 4),
    # A part of an axis: 'a':(m)k is k devices, with m parts of the axis to its left.
    _groups("mesh['a'=8] {'a':(2)4}", GRID, "Y", 4),
    _groups("mesh['a'=8] {'a':(1)2}", GRID, "X", 2),
    _groups("mesh['a'=8] {'a':(2)2}", CUBE, "Y", 2),
    _groups("mesh['a'=8] {'a':(1)2,'a':(4)2}", CUBE, "XZ", 4),
    _groups("mesh['a'=2,'b'=4] {'a','b':(2)2}", CUBE, "XZ", 4),
    # Devices in another order: a list, or numbers in a shape with permuted dimensions.
    _groups("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}", TALL, "X", 4),
    _groups("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", TALL, "Y", 2),
    _groups("mesh['a'=4,'b'=2,'c'=1], device_ids=([2,4]T(1,0)) {'b'}", GRID, "X", 2),
    _groups("mesh['a'=4,'b'=1,'c'=2], device_ids=([2,4]T(1,0)) {'a'}", GRID, "Y", 4),
)

COLLECTIVE_KINDS = (
    Text(
        "every kind, waited for",
        GRID,
        f"""\
HloModule kinds, num_partitions=8

{SUM}
ENTRY %main (p: f32[16,16]) -> (f32[64,16], f32[4,16], f32[16,16], f32[4,16], \
/*index=4*/f32[4,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %all-gather = f32[64,16]{{1,0}} all-gather(%p), channel_id=1, \
replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, dimensions={{0}}, use_global_device_ids=true
  %reduce-scatter = f32[4,16]{{1,0}} reduce-scatter(%p), channel_id=2, \
replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, use_global_device_ids=true, dimensions={{0}}, \
to_apply=%sum
  %collective-permute = f32[16,16]{{1,0}} collective-permute(%p), channel_id=3, \
source_target_pairs={{{{0,4}},{{1,5}},{{2,6}},{{3,7}},{{4,0}},{{5,1}},{{6,2}},{{7,3}}}}
  %s.0 = f32[4,16]{{1,0}} slice(%p), slice={{[0:4], [0:16]}}
  %s.1 = f32[4,16]{{1,0}} slice(%p), slice={{[4:8], [0:16]}}
  %s.2 = f32[4,16]{{1,0}} slice(%p), slice={{[8:12], [0:16]}}
  %s.3 = f32[4,16]{{1,0}} slice(%p), slice={{[12:16], [0:16]}}
  %all-to-all = (f32[4,16]{{1,0}}, f32[4,16]{{1,0}}, f32[4,16]{{1,0}}, \
/*index=3*/f32[4,16]{{1,0}}) all-to-all(%s.0, %s.1, %s.2, /*index=3*/%s.3), channel_id=4, \
replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
  %t.0 = f32[4,16]{{1,0}} get-tuple-element(%all-to-all), index=0
  %t.3 = f32[4,16]{{1,0}} get-tuple-element(%all-to-all), index=3
  ROOT %all = (f32[64,16]{{1,0}}, f32[4,16]{{1,0}}, f32[16,16]{{1,0}}, f32[4,16]{{1,0}}, \
/*index=4*/f32[4,16]{{1,0}}) tuple(%all-gather, %reduce-scatter, %collective-permute, %t.0, \
/*index=4*/%t.3)
}}
""",
        (
            TextCollective(all_gather("Y", 4, 1024)),
            TextCollective(reduce_scatter("Y", 4, 1024)),
            TextCollective(permute("X", 1024)),
            TextCollective(all_to_all("Y", 4, 1024)),
        ),
    ),
    Text(
        "an all-to-all of one array",
        FLAT,
        """\
HloModule exchange, num_partitions=8

ENTRY %main (p: bf16[8,32]) -> bf16[8,32] {
  %p = bf16[8,32]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-to-all = bf16[8,32]{1,0:T(8,128)(2,1)} all-to-all(%p), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={0}
}
""",
        (TextCollective(all_to_all("X", 8, 512, "bfloat16")),),
    ),
    Text(
        "several arrays in one all-reduce",
        FLAT,
        f"""\
HloModule several, num_partitions=8

{SUM}
ENTRY %main (p: f32[16,16], q: f32[8], r: f32[]) -> (f32[16,16], f32[8], f32[]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %q = f32[8]{{0}} parameter(1)
  %r = f32[] parameter(2)
  ROOT %all-reduce = (f32[16,16]{{1,0}}, f32[8]{{0}}, f32[]) all-reduce(%p, %q, %r), channel_id=1, \
replica_groups=mesh['axis_0'=8] {{'axis_0'}}, use_global_device_ids=true, to_apply=%sum
}}
""",
        (TextCollective(all_reduce("X", 8, 1024 + 32 + 4)),),
    ),
    Text(
        "operands with their types",
        FLAT,
        f"""\
HloModule typed, num_partitions=8

{SUM}
ENTRY %main (p: f32[16,16]) -> f32[16,16] {{
  %p = f32[16,16]{{1,0}} parameter(0)
  ROOT %all-reduce = f32[16,16]{{1,0}} all-reduce(f32[16,16]{{1,0}} %p), channel_id=1, \
replica_groups={{{{0,1,2,3,4,5,6,7}}}}, use_global_device_ids=true, to_apply=%sum
}}
""",
        (TextCollective(all_reduce("X", 8, 1024)),),
    ),
    Text(
        "several arrays in one permute",
        FLAT,
        """\
HloModule hopping_two, num_partitions=8

ENTRY %main (p: f32[16,16], q: f32[8]) -> (f32[16,16], f32[8]) {
  %p = f32[16,16]{1,0} parameter(0)
  %q = f32[8]{0} parameter(1)
  ROOT %collective-permute = (f32[16,16]{1,0}, f32[8]{0}) collective-permute(%p, %q), \
channel_id=1, source_target_pairs={{0,1},{2,3}}
}
""",
        (TextCollective(permute("X", 1024 + 32)),),
    ),
    Text(
        "groups of one device say nothing to anybody",
        FLAT,
        _reduce_module("{{0},{1},{2},{3},{4},{5},{6},{7}}"),
        (),
    ),
    Text(
        "a permute to itself alone",
        FLAT,
        """\
HloModule still, num_partitions=8

ENTRY %main (p: f32[16,16]) -> f32[16,16] {
  %p = f32[16,16]{1,0} parameter(0)
  ROOT %stay = f32[16,16]{1,0} collective-permute(%p), channel_id=1, \
source_target_pairs={{0,0},{1,1},{2,2},{3,3},{4,4},{5,5},{6,6},{7,7}}
}
""",
        (),
    ),
    Text(
        "a collective in a called computation, called twice",
        FLAT,
        f"""\
HloModule called, num_partitions=8

{SUM}
%inner (p: f32[16,16]) -> f32[16,16] {{
  %p = f32[16,16]{{1,0}} parameter(0)
  ROOT %all-reduce = f32[16,16]{{1,0}} all-reduce(%p), channel_id=1, \
replica_groups={{{{0,1,2,3,4,5,6,7}}}}, use_global_device_ids=true, to_apply=%sum
}}

ENTRY %main (q: f32[16,16]) -> f32[16,16] {{
  %q = f32[16,16]{{1,0}} parameter(0)
  %once = f32[16,16]{{1,0}} call(%q), to_apply=%inner
  ROOT %twice = f32[16,16]{{1,0}} call(%once), to_apply=%inner
}}
""",
        (TextCollective(all_reduce("X", 8, 1024, count=2)),),
    ),
    Text(
        "words that look like collectives and are none",
        FLAT,
        """\
HloModule decoy, num_partitions=8

ENTRY %main (all-gather: f32[16,16]) -> f32[16,16] {
  %all-gather = f32[16,16]{1,0} parameter(0), metadata={op_name="all-reduce(x)"}
  %all-reduce.7 = f32[16,16]{1,0} negate(%all-gather), \
metadata={op_name="jit(f)/all-to-all(y), replica_groups={{0,1}}"}
  ROOT %reduce-scatter-done = f32[16,16]{1,0} custom-call(%all-reduce.7), \
custom_call_target="all-gather-start", backend_config="{\\"text\\":\\"= f32[4] all-reduce(%x)\\"}"
}
""",
        (),
    ),
)
