"""`expect_communication`: its contracts, and its messages when a program breaks them."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from drumline.errors import UserError
from drumline.inspect import UnexpectedCommunication, expect_communication
from tests.inspect.expected import ProgramCall
from tests.inspect.meshes import mesh_of, shape_on

KIB = 1024
ROWS_AND_COLUMNS = P("X", "Y")


def program_of(body: Any, out: P = ROWS_AND_COLUMNS) -> ProgramCall:
    """Return a body under shard_map on X=2,Y=4, with a float32 shard of 32×32: 4 KiB."""
    mesh = mesh_of((2, 4))
    function = jax.shard_map(body, mesh=mesh, in_specs=P("X", "Y"), out_specs=out, check_vma=False)
    return ProgramCall(function, (shape_on(mesh, (64, 128), P("X", "Y")),), mesh)


def gathers(x: jax.Array) -> jax.Array:
    """Gather over Y. Each device sends three shards of 4 KiB."""
    return jnp.sin(lax.all_gather(x, "Y", axis=1, tiled=True))


def gathers_and_sums(x: jax.Array) -> jax.Array:
    total = lax.all_gather(x, "Y", axis=1, tiled=True)
    return jnp.sin(total) + lax.psum(x.sum(), ("X", "Y"))


def gathers_in_a_loop(x: jax.Array) -> jax.Array:
    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.sin(lax.all_gather(x, "Y", axis=1, tiled=True))[:, :32], None

    return lax.scan(layer, x, length=5)[0]


GATHERS = program_of(gathers, P("X", None))
GATHERS_AND_SUMS = program_of(gathers_and_sums, P("X", None))
LOOP = program_of(gathers_in_a_loop)


def expect(program: ProgramCall, **contract: Any) -> Any:
    return expect_communication(program.function, *program.arguments, mesh=program.mesh, **contract)


@pytest.mark.parametrize(
    "allow",
    [
        {"all-gather": {"Y": "12 KiB"}},
        {"all-gather": {"Y": 12 * KIB}},
        {"all-gather": {"Y": "12.288 kB"}},
        {"all-gather": {"Y": None}},
        {"all-gather": {("Y",): "12 KiB"}},
        {"all-gather": "12 KiB"},
        {"all-gather": None},
        ["all-gather"],
        "all-gather",
        {"all-gather": {"Y": "12 KiB"}, "all-reduce": "1 GiB"},
    ],
)
def test_allowed_communication_passes_and_is_returned(allow: Any) -> None:
    report = expect(GATHERS, allow=allow)
    (results,) = report.collectives
    assert (results.kind, results.axes, results.total) == ("all-gather", ("Y",), 12 * KIB)


@pytest.mark.parametrize(
    ("allow", "expected_text"),
    [
        ((), "all-gather over Y of float32, 12 KiB, at "),
        ({}, "is not allowed"),
        (["all-reduce"], "is not allowed"),
        ({"all-gather": {"X": "1 GiB"}}, "all-gather over Y"),
        ({"all-gather": {"X,Y": "1 GiB"}}, "is not allowed"),
        (
            {"all-gather": {"Y": "12287 B"}},
            "all-gather over Y: 12 KiB a device, and 12 KiB are allowed",
        ),
        ({"all-gather": {"Y": "8 KiB"}}, "12 KiB a device, and 8 KiB are allowed"),
        ({"all-gather": 8 * KIB}, "all-gather: 12 KiB a device, and 8 KiB are allowed"),
        ({"all-gather": {"Y": 0}}, "0 B are allowed"),
    ],
)
def test_other_communication_fails_with_the_line_and_the_table(
    allow: Any, expected_text: str
) -> None:
    with pytest.raises(UnexpectedCommunication) as error_info:
        expect(GATHERS, allow=allow)
    message = str(error_info.value)
    assert expected_text in message
    assert "test_contracts.py:" in message.splitlines()[0] + message.splitlines()[1]
    assert "KIND" in message, "the whole table"


def test_the_error_is_an_assertion_error() -> None:
    assert issubclass(UnexpectedCommunication, AssertionError)


def test_several_axes_at_once_are_written_in_any_order() -> None:
    for axes in ("X,Y", "Y, X", ("X", "Y"), ("Y", "X")):
        report = expect(GATHERS_AND_SUMS, allow={"all-gather": None, "all-reduce": {axes: "1 KiB"}})
        assert {results.kind for results in report.collectives} == {"all-gather", "all-reduce"}
    with pytest.raises(UnexpectedCommunication, match=r"all-reduce over X and Y .* is not allowed"):
        expect(GATHERS_AND_SUMS, allow={"all-gather": None, "all-reduce": {"X": "1 KiB"}})


@pytest.mark.parametrize("forbid", ["all-to-all", ["all-to-all", "collective-permute"]])
def test_communication_that_is_not_forbidden_passes(forbid: Any) -> None:
    assert len(expect(GATHERS_AND_SUMS, forbid=forbid).collectives) == 2


@pytest.mark.parametrize(
    ("forbid", "kinds"),
    [
        ("all", {"all-gather", "all-reduce"}),
        ("all-gather", {"all-gather"}),
        (["all-gather", "all-to-all"], {"all-gather"}),
        (("all-reduce",), {"all-reduce"}),
    ],
)
def test_forbidden_communication_fails_with_a_line_for_each(forbid: Any, kinds: set[str]) -> None:
    with pytest.raises(UnexpectedCommunication) as error_info:
        expect(GATHERS_AND_SUMS, forbid=forbid)
    lines = str(error_info.value).partition("\n\n")[0].splitlines()
    assert all(line.endswith("is forbidden") for line in lines)
    assert {line.split()[0] for line in lines} == kinds


def test_a_silent_program_passes_every_contract() -> None:
    silent_program = program_of(jnp.sin)
    assert expect(silent_program, forbid="all").collectives == ()
    assert expect(silent_program, allow=()).collectives == ()
    assert expect(silent_program, allow={"all-gather": 0}).sent == 0


def test_the_iterations_of_a_loop_are_added_up() -> None:
    expect(LOOP, allow={"all-gather": {"Y": "60 KiB"}})
    with pytest.raises(UnexpectedCommunication) as error_info:
        expect(LOOP, allow={"all-gather": {"Y": "59 KiB"}})
    message = str(error_info.value)
    assert "all-gather over Y: 60 KiB a device, and 59 KiB are allowed" in message
    assert "12 KiB × 5" in message


@pytest.mark.parametrize(
    ("contract", "expected_text"),
    [
        ({"allow": ["allgather"]}, "'allgather' is not a kind of collective; there are all-gather"),
        ({"allow": {"all_gather": None}}, "'all_gather' is not a kind"),
        ({"forbid": "everything"}, "'everything' is not a kind"),
        ({"forbid": ["all-gather", "gossip"]}, "'gossip' is not a kind"),
        ({"allow": {"all-gather": "much"}}, "all-gather: 'much' is not a size"),
        ({"allow": {"all-gather": {"Y": "8 MiBs"}}}, "all-gather over Y: '8 MiBs' is not a size"),
        ({"allow": {"all-gather": "-1"}}, "'-1' is not a size"),
        ({"allow": {"all-gather": -1}}, "-1 is not a size"),
        ({"allow": {"all-gather": True}}, "True is not a size"),
        ({"allow": ["all-gather"], "forbid": "all"}, "either allow= or forbid="),
    ],
)
def test_an_invalid_contract_is_rejected(contract: dict[str, Any], expected_text: str) -> None:
    with pytest.raises(UserError) as error_info:
        expect(GATHERS, **contract)
    assert expected_text in str(error_info.value)
    assert "\n" not in str(error_info.value)
