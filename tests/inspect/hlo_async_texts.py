"""HLO modules, written by hand, with collectives that start, overlap with compute, and are done."""

from __future__ import annotations

from tests.inspect.expected import (
    all_gather,
    all_reduce,
    all_to_all,
    permute,
    reduce_scatter,
)
from tests.inspect.hlo_texts import DOT, FLAT, GRID, SUM, Text, TextCollective

# A computation and the fusion that calls it have the same name, so the overlapping one is unique.
PRODUCT = f"""\
%product (x: f32[16,16], y: f32[16,16]) -> f32[16,16] {{
  %x = f32[16,16]{{1,0}} parameter(0)
  %y = f32[16,16]{{1,0}} parameter(1)
  ROOT %x_times_y = f32[16,16]{{1,0}} dot(%x, %y), {DOT}
}}
"""
SECOND = PRODUCT.replace("%product", "%second")

FUSED = """\
%part.MARK (a: f32[16,16]) -> f32[64,16] {
  %a = f32[16,16]{1,0} parameter(0)
  %all-gather.1 = f32[64,16]{1,0} all-gather(%a), channel_id=1, replica_groups=[2,4]<=[8], \
dimensions={0}, use_global_device_ids=true
  ROOT %mark = f32[64,16]{1,0} custom-call(%all-gather.1), \
custom_call_target="AsyncCollectiveMARK"
}
"""

ASYNCHRONOUS = (
    Text(
        "all-gather that is fused with others' work",
        GRID,
        f"""\
HloModule gathering, is_scheduled=true, num_partitions=8

{FUSED.replace("MARK", "Start")}
{FUSED.replace("MARK", "Done")}
{PRODUCT}
{SECOND}
ENTRY %main (p: f32[16,16], w: f32[16,16]) -> (f32[64,16], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %w = f32[16,16]{{1,0}} parameter(1)
  %start = f32[64,16]{{1,0}} fusion(%p), kind=kCustom, calls=%part.Start
  %product = f32[16,16]{{1,0}} fusion(%p, %w), kind=kOutput, calls=%product
  %end = f32[64,16]{{1,0}} fusion(%start), kind=kCustom, calls=%part.Done
  %second = f32[16,16]{{1,0}} fusion(%p, %product), kind=kOutput, calls=%second
  ROOT %both = (f32[64,16]{{1,0}}, f32[16,16]{{1,0}}) tuple(%end, %second)
}}
""",
        (TextCollective(all_gather("Y", 4, 1024), asynchronous=True, between=("product",)),),
    ),
    Text(
        "all-gather-start and -done",
        GRID,
        f"""\
HloModule gathering, is_scheduled=true, num_partitions=8

{PRODUCT}
ENTRY %main (p: f32[16,16], w: f32[16,16]) -> (f32[64,16], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %w = f32[16,16]{{1,0}} parameter(1)
  %all-gather-start = (f32[16,16]{{1,0}}, f32[64,16]{{1,0}}) all-gather-start(%p), channel_id=1, \
replica_groups=[2,4]<=[8], dimensions={{0}}, use_global_device_ids=true
  %product = f32[16,16]{{1,0}} fusion(%p, %w), kind=kOutput, calls=%product
  %all-gather-done = f32[64,16]{{1,0}} all-gather-done(%all-gather-start)
  ROOT %both = (f32[64,16]{{1,0}}, f32[16,16]{{1,0}}) tuple(%all-gather-done, %product)
}}
""",
        (TextCollective(all_gather("Y", 4, 1024), asynchronous=True, between=("product",)),),
    ),
    Text(
        "several arrays in one all-gather-start",
        GRID,
        f"""\
HloModule gathering_two, is_scheduled=true, num_partitions=8

{PRODUCT}
ENTRY %main (p: f32[16,16], w: f32[8,16]) -> (f32[64,16], f32[32,16], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %w = f32[8,16]{{1,0}} parameter(1)
  %start = ((f32[16,16]{{1,0}}, f32[8,16]{{1,0}}), (f32[64,16]{{1,0}}, f32[32,16]{{1,0}})) \
all-gather-start(%p, %w), channel_id=1, replica_groups=[2,4]<=[8], dimensions={{0}}, \
use_global_device_ids=true
  %product = f32[16,16]{{1,0}} fusion(%p, %p), kind=kOutput, calls=%product
  %done = (f32[64,16]{{1,0}}, f32[32,16]{{1,0}}) all-gather-done(%start)
  %q = f32[64,16]{{1,0}} get-tuple-element(%done), index=0
  %v = f32[32,16]{{1,0}} get-tuple-element(%done), index=1
  ROOT %all = (f32[64,16]{{1,0}}, f32[32,16]{{1,0}}, f32[16,16]{{1,0}}) tuple(%q, %v, %product)
}}
""",
        (TextCollective(all_gather("Y", 4, 1024 + 512), asynchronous=True, between=("product",)),),
    ),
    Text(
        "all-reduce-start and -done, with nothing between them",
        FLAT,
        f"""\
HloModule reducing, is_scheduled=true, num_partitions=8

{SUM}
{PRODUCT}
ENTRY %main (p: f32[16,16], w: f32[16,16]) -> f32[16,16] {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %w = f32[16,16]{{1,0}} parameter(1)
  %product = f32[16,16]{{1,0}} fusion(%p, %w), kind=kOutput, calls=%product
  %all-reduce-start = f32[16,16]{{1,0}} all-reduce-start(%product), channel_id=1, \
replica_groups=mesh['axis_0'=8] {{'axis_0'}}, use_global_device_ids=true, to_apply=%sum
  ROOT %all-reduce-done = f32[16,16]{{1,0}} all-reduce-done(%all-reduce-start)
}}
""",
        (TextCollective(all_reduce("X", 8, 1024), asynchronous=True),),
    ),
    Text(
        "collective-permute-start and -done, both ways at once",
        FLAT,
        f"""\
HloModule hopping, is_scheduled=true, num_partitions=8

{PRODUCT}
{SECOND}
ENTRY %main (p: bf16[16,16], w: f32[16,16]) -> (bf16[16,16], bf16[16,16], f32[16,16]) {{
  %p = bf16[16,16]{{1,0:T(8,128)(2,1)}} parameter(0)
  %w = f32[16,16]{{1,0:T(8,128)}} parameter(1)
  %right = (bf16[16,16]{{1,0:T(8,128)(2,1)}}, bf16[16,16]{{1,0:T(8,128)(2,1)}}, \
u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%p), channel_id=1, \
source_target_pairs={{{{0,1}},{{1,2}},{{2,3}},{{3,4}},{{4,5}},{{5,6}},{{6,7}},{{7,0}}}}
  %product = f32[16,16]{{1,0:T(8,128)}} fusion(%w, %w), kind=kOutput, calls=%product
  %left = (bf16[16,16]{{1,0:T(8,128)(2,1)}}, bf16[16,16]{{1,0:T(8,128)(2,1)}}, \
u32[]{{:S(2)}}, u32[]{{:S(2)}}) collective-permute-start(%p), channel_id=2, \
source_target_pairs={{{{1,0}},{{2,1}},{{3,2}},{{4,3}},{{5,4}},{{6,5}},{{7,6}},{{0,7}}}}
  %second = f32[16,16]{{1,0:T(8,128)}} fusion(%product, %w), kind=kOutput, calls=%second
  %from_left = bf16[16,16]{{1,0:T(8,128)(2,1)}} collective-permute-done(%right)
  %from_right = bf16[16,16]{{1,0:T(8,128)(2,1)}} collective-permute-done(%left)
  ROOT %all = (bf16[16,16]{{1,0:T(8,128)(2,1)}}, bf16[16,16]{{1,0:T(8,128)(2,1)}}, \
f32[16,16]{{1,0:T(8,128)}}) tuple(%from_left, %from_right, %second)
}}
""",
        (
            TextCollective(
                permute("X", 512, "bfloat16"), asynchronous=True, between=("product", "second")
            ),
            TextCollective(permute("X", 512, "bfloat16"), asynchronous=True, between=("second",)),
        ),
    ),
    Text(
        "reduce-scatter-start and -done",
        GRID,
        f"""\
HloModule scattering, is_scheduled=true, num_partitions=8

{SUM}
{PRODUCT}
ENTRY %main (p: f32[16,16], w: f32[16,16]) -> (f32[4,16], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %w = f32[16,16]{{1,0}} parameter(1)
  %start = ((f32[16,16]{{1,0}}), f32[4,16]{{1,0}}) reduce-scatter-start(%p), channel_id=1, \
replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, use_global_device_ids=true, dimensions={{0}}, \
to_apply=%sum
  %product = f32[16,16]{{1,0}} fusion(%p, %w), kind=kOutput, calls=%product
  %done = f32[4,16]{{1,0}} reduce-scatter-done(%start)
  ROOT %both = (f32[4,16]{{1,0}}, f32[16,16]{{1,0}}) tuple(%done, %product)
}}
""",
        (TextCollective(reduce_scatter("Y", 4, 1024), asynchronous=True, between=("product",)),),
    ),
    Text(
        "async-start and -done of computations",
        GRID,
        f"""\
HloModule wrapped, is_scheduled=true, num_partitions=8

{SUM}
{PRODUCT}
%scattered (s: f32[16,16]) -> f32[4,16] {{
  %s = f32[16,16]{{1,0}} parameter(0)
  ROOT %reduce-scatter = f32[4,16]{{1,0}} reduce-scatter(%s), channel_id=1, \
replica_groups=[2,4]<=[8], use_global_device_ids=true, dimensions={{0}}, to_apply=%sum
}}

%exchanged (e: f32[16,16]) -> f32[16,16] {{
  %e = f32[16,16]{{1,0}} parameter(0)
  ROOT %all-to-all = f32[16,16]{{1,0}} all-to-all(%e), channel_id=2, \
replica_groups=[4,2]<=[2,4]T(1,0), dimensions={{0}}
}}

ENTRY %main (p: f32[16,16], w: f32[16,16]) -> (f32[4,16], f32[16,16], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %w = f32[16,16]{{1,0}} parameter(1)
  %start.1 = ((f32[16,16]{{1,0}}), f32[4,16]{{1,0}}, s32[]) async-start(%p), calls=%scattered
  %product = f32[16,16]{{1,0}} fusion(%p, %w), kind=kOutput, calls=%product
  %done.1 = f32[4,16]{{1,0}} async-done(%start.1)
  %start.2 = ((f32[16,16]{{1,0}}), f32[16,16]{{1,0}}, s32[]) async-start(%w), calls=%exchanged
  %done.2 = f32[16,16]{{1,0}} async-done(%start.2)
  ROOT %all = (f32[4,16]{{1,0}}, f32[16,16]{{1,0}}, f32[16,16]{{1,0}}) \
tuple(%done.1, %done.2, %product)
}}
""",
        (
            TextCollective(reduce_scatter("Y", 4, 1024), asynchronous=True, between=("product",)),
            TextCollective(all_to_all("X", 2, 1024), asynchronous=True),
        ),
    ),
    Text(
        "an asynchronous collective inside a fusion",
        GRID,
        f"""\
HloModule fused, is_scheduled=true, num_partitions=8

{PRODUCT}
%gathered_beside (f: f32[16,16], v: f32[16,16]) -> (f32[64,16], f32[16,16]) {{
  %f = f32[16,16]{{1,0}} parameter(0)
  %v = f32[16,16]{{1,0}} parameter(1)
  %all-gather-start = (f32[16,16]{{1,0}}, f32[64,16]{{1,0}}) all-gather-start(%f), channel_id=1, \
replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, dimensions={{0}}, use_global_device_ids=true
  %product = f32[16,16]{{1,0}} fusion(%f, %v), kind=kOutput, calls=%product
  %all-gather-done = f32[64,16]{{1,0}} all-gather-done(%all-gather-start)
  ROOT %pair = (f32[64,16]{{1,0}}, f32[16,16]{{1,0}}) tuple(%all-gather-done, %product)
}}

ENTRY %main (p: f32[16,16], w: f32[16,16]) -> (f32[64,16], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %w = f32[16,16]{{1,0}} parameter(1)
  ROOT %fusion = (f32[64,16]{{1,0}}, f32[16,16]{{1,0}}) fusion(%p, %w), kind=kCustom, \
calls=%gathered_beside
}}
""",
        (TextCollective(all_gather("Y", 4, 1024), asynchronous=True, between=("product",)),),
    ),
    Text(
        "under way while a loop runs",
        FLAT,
        f"""\
HloModule hidden, is_scheduled=true, num_partitions=8

{PRODUCT}
%body (s: (s32[], f32[16,16])) -> (s32[], f32[16,16]) {{
  %s = (s32[], f32[16,16]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[16,16]{{1,0}} get-tuple-element(%s), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %product = f32[16,16]{{1,0}} fusion(%v, %v), kind=kOutput, calls=%product
  ROOT %state = (s32[], f32[16,16]{{1,0}}) tuple(%next, %product)
}}

%condition (t: (s32[], f32[16,16])) -> pred[] {{
  %t = (s32[], f32[16,16]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %limit = s32[] constant(4)
  ROOT %less = pred[] compare(%j, %limit), direction=LT
}}

ENTRY %main (p: f32[16,16], w: f32[16,16]) -> (f32[128,16], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %w = f32[16,16]{{1,0}} parameter(1)
  %zero = s32[] constant(0)
  %begin = (s32[], f32[16,16]{{1,0}}) tuple(%zero, %w)
  %start = (f32[16,16]{{1,0}}, f32[128,16]{{1,0}}) all-gather-start(%p), channel_id=1, \
replica_groups=[1,8]<=[8], dimensions={{0}}, use_global_device_ids=true
  %loop = (s32[], f32[16,16]{{1,0}}) while(%begin), condition=%condition, body=%body, \
backend_config={{"known_trip_count":{{"n":"4"}}}}
  %done = f32[128,16]{{1,0}} all-gather-done(%start)
  %last = f32[16,16]{{1,0}} get-tuple-element(%loop), index=1
  ROOT %both = (f32[128,16]{{1,0}}, f32[16,16]{{1,0}}) tuple(%done, %last)
}}
""",
        (TextCollective(all_gather("X", 8, 1024), asynchronous=True, between=("loop",)),),
    ),
)
