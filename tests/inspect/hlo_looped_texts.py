"""HLO modules, written by hand, with loops, branches, and two forms of source locations."""

from __future__ import annotations

from tests.inspect.expected import all_reduce, permute
from tests.inspect.hlo_texts import FLAT, SUM, Text, TextCollective

PAIRS = "{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}"


def _loop(
    *,
    begin: int = 0,
    step: int = 1,
    limit: str = "constant(7)",
    direction: str = "LT",
    config: str = "",
    fused: bool = False,
    constant_first: bool = False,
) -> str:
    """Return a loop with a permute in its body, and with a given form of its condition."""
    operands = "%limit, %j" if constant_first else "%j, %limit"
    test = f"compare({operands}), direction={direction}"
    if fused:
        test = f"fusion({operands}), kind=kLoop, calls=%compared"
    return f"""\
HloModule looped, num_partitions=8

%compared (l: s32[], r: s32[]) -> pred[] {{
  %l = s32[] parameter(0)
  %r = s32[] parameter(1)
  ROOT %is = pred[] compare(%l, %r), direction={direction}
}}

%body (s: (s32[], f32[16,16], s32[])) -> (s32[], f32[16,16], s32[]) {{
  %s = (s32[], f32[16,16]{{1,0}}, s32[]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[16,16]{{1,0}} get-tuple-element(%s), index=1
  %n = s32[] get-tuple-element(%s), index=2
  %step = s32[] constant({step})
  %next = s32[] add(%i, %step)
  %hop = f32[16,16]{{1,0}} collective-permute(%v), channel_id=1, source_target_pairs={PAIRS}
  ROOT %state = (s32[], f32[16,16]{{1,0}}, s32[]) tuple(%next, %hop, %n)
}}

%condition (t: (s32[], f32[16,16], s32[])) -> pred[] {{
  %t = (s32[], f32[16,16]{{1,0}}, s32[]) parameter(0)
  %j = s32[] get-tuple-element(%t), index=0
  %limit = s32[] {limit}
  ROOT %test = pred[] {test}
}}

ENTRY %main (p: f32[16,16], m: s32[]) -> f32[16,16] {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %m = s32[] parameter(1)
  %begin = s32[] constant({begin})
  %first = (s32[], f32[16,16]{{1,0}}, s32[]) tuple(%begin, %p, %m)
  %while = (s32[], f32[16,16]{{1,0}}, s32[]) while(%first), condition=%condition, body=%body{config}
  ROOT %out = f32[16,16]{{1,0}} get-tuple-element(%while), index=1
}}
"""


def _permutes(count: int) -> tuple[TextCollective, ...]:
    return (TextCollective(permute("X", 1024, count=count)),)


NO_LIMIT = "get-tuple-element(%t), index=2"
KNOWN = ', backend_config={"known_trip_count":{"n":"9"}}'

LOOPS = (
    Text(
        "a loop whose length is written at it",
        FLAT,
        _loop(limit=NO_LIMIT, config=KNOWN),
        _permutes(9),
    ),
    Text(
        "a loop whose length is written among other things",
        FLAT,
        _loop(
            limit=NO_LIMIT,
            config=', metadata={op_name="jit(f)/while"}, backend_config={"dynamic_variables":[],'
            '"known_induction_variable":{"tuple_index":"0"},'
            '"known_init_step":{"init":"0","step":"1"},"known_trip_count":{"n":"12"}}',
        ),
        _permutes(12),
    ),
    Text("a loop up to a constant", FLAT, _loop(), _permutes(7)),
    Text("a loop up to and with a constant", FLAT, _loop(direction="LE"), _permutes(8)),
    Text("a loop whose test is a fusion", FLAT, _loop(fused=True), _permutes(7)),
    Text("a loop that begins at 3", FLAT, _loop(begin=3), _permutes(4)),
    Text("a loop in steps of two", FLAT, _loop(step=2), _permutes(4)),
    Text(
        "a loop that counts down",
        FLAT,
        _loop(begin=5, step=-1, limit="constant(0)", direction="GT"),
        _permutes(5),
    ),
    Text(
        "a loop whose test has the constant first",
        FLAT,
        _loop(direction="GT", constant_first=True),
        _permutes(7),
    ),
    Text(
        "a loop up to what the data say",
        FLAT,
        _loop(limit=NO_LIMIT),
        (TextCollective(permute("X", 1024), at_least=True),),
    ),
    Text(
        "a loop in a loop",
        FLAT,
        f"""\
HloModule nested, num_partitions=8

%inner_body (a: (s32[], f32[16,16])) -> (s32[], f32[16,16]) {{
  %a = (s32[], f32[16,16]{{1,0}}) parameter(0)
  %ai = s32[] get-tuple-element(%a), index=0
  %av = f32[16,16]{{1,0}} get-tuple-element(%a), index=1
  %hop = f32[16,16]{{1,0}} collective-permute(%av), channel_id=1, source_target_pairs={PAIRS}
  ROOT %as = (s32[], f32[16,16]{{1,0}}) tuple(%ai, %hop)
}}

%always (c: (s32[], f32[16,16])) -> pred[] {{
  %c = (s32[], f32[16,16]{{1,0}}) parameter(0)
  ROOT %true = pred[] constant(true)
}}

%outer_body (b: (s32[], f32[16,16])) -> (s32[], f32[16,16]) {{
  %b = (s32[], f32[16,16]{{1,0}}) parameter(0)
  ROOT %inner = (s32[], f32[16,16]{{1,0}}) while(%b), condition=%always, body=%inner_body, \
backend_config={{"known_trip_count":{{"n":"4"}}}}
}}

ENTRY %main (p: f32[16,16]) -> (s32[], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %zero = s32[] constant(0)
  %first = (s32[], f32[16,16]{{1,0}}) tuple(%zero, %p)
  ROOT %outer = (s32[], f32[16,16]{{1,0}}) while(%first), condition=%always, body=%outer_body, \
backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
""",
        _permutes(12),
    ),
    Text(
        "a branch that may be taken",
        FLAT,
        f"""\
HloModule branching, num_partitions=8

%moved (a: f32[16,16]) -> f32[16,16] {{
  %a = f32[16,16]{{1,0}} parameter(0)
  ROOT %hop = f32[16,16]{{1,0}} collective-permute(%a), channel_id=1, source_target_pairs={PAIRS}
}}

%kept (b: f32[16,16]) -> f32[16,16] {{
  ROOT %b = f32[16,16]{{1,0}} parameter(0)
}}

ENTRY %main (p: f32[16,16], q: pred[], i: s32[]) -> (f32[16,16], f32[16,16]) {{
  %p = f32[16,16]{{1,0}} parameter(0)
  %q = pred[] parameter(1)
  %i = s32[] parameter(2)
  %either = f32[16,16]{{1,0}} conditional(%q, %p, %p), true_computation=%moved, \
false_computation=%kept
  %one = f32[16,16]{{1,0}} conditional(%i, %either, %either), branch_computations={{%kept, %moved}}
  ROOT %both = (f32[16,16]{{1,0}}, f32[16,16]{{1,0}}) tuple(%either, %one)
}}
""",
        _permutes(2),
    ),
)


def _located(metadata: str, tables: str = "") -> str:
    return f"""\
HloModule located, is_scheduled=true, num_partitions=8
{tables}
{SUM}
ENTRY %main (p: f32[16,16]) -> f32[16,16] {{
  %p = f32[16,16]{{1,0}} parameter(0), metadata={{op_name="x"}}
  ROOT %psum.1 = f32[16,16]{{1,0}} all-reduce(%p), channel_id=1, \
replica_groups={{{{0,1,2,3,4,5,6,7}}}}, use_global_device_ids=true, to_apply=%sum, {metadata}
}}
"""


# The parent's ID is the frame's number plus one, and 1 means no parent.
TABLES = """
FileNames
1 "/home/user/train.py"
2 "/home/user/model.py"
3 "/usr/lib/python3.12/site-packages/jax/_src/ad_checkpoint.py"

FunctionNames
1 "main"
2 "attention"
3 "checkpoint.<locals>.fun_remat"

FileLocations
1 {file_name_id=1 function_name_id=1 line=80 end_line=80 column=4 end_column=31}
2 {file_name_id=2 function_name_id=2 line=41 end_line=43 column=11 end_column=12}
3 {file_name_id=3 function_name_id=3 line=500 end_line=500 column=8 end_column=19}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}

"""


def _all_reduce_from(source: str | None, *scopes: str) -> tuple[TextCollective, ...]:
    return (TextCollective(all_reduce("X", 8, 1024), source=source, scopes=scopes),)


SOURCES = (
    Text(
        "the line is written at the instruction",
        FLAT,
        _located(
            'metadata={op_type="psum" op_name="jit(step)/shard_map/attention/scores/psum" '
            'source_file="/home/user/my model.py" source_line=17 source_end_line=17 '
            "source_column=8 source_end_column=20}"
        ),
        _all_reduce_from("/home/user/my model.py:17", "attention", "scores"),
    ),
    Text(
        "the line is in the tables",
        FLAT,
        _located(
            'metadata={op_name="jit(step)/transpose(jvp(attention))/psum" stack_frame_id=2}', TABLES
        ),
        _all_reduce_from("/home/user/model.py:41", "attention"),
    ),
    Text(
        "the innermost line is JAX's own: the user's is its caller's",
        FLAT,
        _located('metadata={op_name="jit(step)/checkpoint/psum" stack_frame_id=3}', TABLES),
        _all_reduce_from("/home/user/model.py:41"),
    ),
    Text(
        "no line is written",
        FLAT,
        _located('metadata={op_name="jit(step)/psum"}'),
        _all_reduce_from(None),
    ),
    Text(
        "no metadata at all", FLAT, _located('frontend_attributes={a="b"}'), _all_reduce_from(None)
    ),
)
