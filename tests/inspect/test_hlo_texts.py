"""HLO text is read in every spelling: groups, asynchronous pairs, loops and source lines."""

from __future__ import annotations

import pytest

from drumline.inspect.collectives import Collective, find_collectives
from drumline.inspect.hlo.text import parse_module
from tests.inspect.expected import expected_counts, tally
from tests.inspect.hlo_async_texts import ASYNCHRONOUS
from tests.inspect.hlo_looped_texts import LOOPS, SOURCES
from tests.inspect.hlo_texts import COLLECTIVE_KINDS, GROUPS, Text

TEXTS = (*GROUPS, *COLLECTIVE_KINDS, *ASYNCHRONOUS, *LOOPS, *SOURCES)


def read(text: Text) -> list[Collective]:
    return list(find_collectives(parse_module(text.module), dict(text.mesh)))


def named(text: Text) -> str:
    return text.name


@pytest.mark.parametrize("text", TEXTS, ids=named)
def test_the_collectives_of_a_text(text: Text) -> None:
    collectives = read(text)
    report = tally(
        ((one.kind, tuple(one.axes), one.dtype, one.sent), one.count) for one in collectives
    )
    assert report == expected_counts(one.collective for one in text.collectives)
    assert {one.at_least for one in collectives} == {one.at_least for one in text.collectives}


@pytest.mark.parametrize("text", TEXTS, ids=named)
def test_only_what_starts_and_is_done_is_asynchronous(text: Text) -> None:
    report = sorted((one.kind, one.asynchronous, tuple(one.between)) for one in read(text))
    # One instruction may run more often than once, and two instructions be alike.
    assert set(report) == {
        (one.collective.kind, one.asynchronous, one.between) for one in text.collectives
    }


@pytest.mark.parametrize("text", SOURCES, ids=named)
def test_the_line_and_the_scopes_of_a_collective(text: Text) -> None:
    (report,), (expected,) = read(text), text.collectives
    assert (report.source or None) == expected.source
    for scope in expected.scopes:
        assert scope in report.scope
    assert "psum" not in report.scope  # the operation's own name


@pytest.mark.parametrize(
    "metadata",
    [
        r'"mesh_axes":"[\"X\", \"Y\"]"',
        # As splash attention has it: braces within the string.
        r'"xprof_metadata":"{\"block_q\": 512, \"layout\": \"}\"}"',
    ],
)
def test_a_kernel_whose_metadata_breaks_its_line(metadata: str) -> None:
    module = parse_module(
        f"""\
HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (x: bf16[64,128]) -> bf16[64,128] {{
  %x = bf16[64,128]{{1,0}} parameter(0)
  %kernel.1 = bf16[64,128]{{1,0}} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={{kernel_metadata={{
{metadata}
}}}}, metadata={{op_name="kernel"}}, backend_config={{"size":"12"}}
  ROOT %copy.2 = bf16[64,128]{{1,0}} copy(%kernel.1)
}}
"""
    )
    assert [one.name for one in module.entry.instructions] == ["x", "kernel.1", "copy.2"]
    assert module.entry.instructions[1].attributes["backend_config"] == '{"size":"12"}'
