"""HLO text is parsed in every form: groups, asynchronous pairs, loops and source lines."""

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


def name_of(text: Text) -> str:
    return text.name


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_a_text_has_the_expected_collectives(text: Text) -> None:
    collectives = read(text)
    report = tally(
        (
            (collective.kind, tuple(collective.axes), collective.dtype, collective.sent),
            collective.count,
        )
        for collective in collectives
    )
    assert report == expected_counts(collective.collective for collective in text.collectives)
    assert {collective.at_least for collective in collectives} == {
        collective.at_least for collective in text.collectives
    }


@pytest.mark.parametrize("text", TEXTS, ids=name_of)
def test_only_start_and_done_pairs_are_asynchronous(text: Text) -> None:
    report = sorted(
        (collective.kind, collective.asynchronous, tuple(collective.between))
        for collective in read(text)
    )
    # One instruction may run several times, and two instructions may be equal.
    assert set(report) == {
        (collective.collective.kind, collective.asynchronous, collective.between)
        for collective in text.collectives
    }


@pytest.mark.parametrize("text", SOURCES, ids=name_of)
def test_a_collective_has_its_line_and_scopes(text: Text) -> None:
    (report,), (expected,) = read(text), text.collectives
    assert (report.source or None) == expected.source
    for scope in expected.scopes:
        assert scope in report.scope
    assert "psum" not in report.scope  # the operation's own name


@pytest.mark.parametrize(
    "metadata",
    [
        r'"mesh_axes":"[\"X\", \"Y\"]"',
        # Splash attention writes braces within the string.
        r'"xprof_metadata":"{\"block_q\": 512, \"layout\": \"}\"}"',
    ],
)
def test_a_kernel_with_line_breaks_in_its_metadata_is_parsed(metadata: str) -> None:
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
    assert [instruction.name for instruction in module.entry.instructions] == [
        "x",
        "kernel.1",
        "copy.2",
    ]
    assert module.entry.instructions[1].attributes["backend_config"] == '{"size":"12"}'
