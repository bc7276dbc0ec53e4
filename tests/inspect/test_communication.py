"""`communication` reports the known programs' kinds, axes, types, bytes and counts.

The result is the same for a function, a lowered or a compiled program, and for arrays or their
shapes.
"""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.inspect import communication
from tests.inspect.expected import (
    Program,
    ProgramCall,
    all_reduce,
    expected_counts,
    reported_counts,
    totals,
)
from tests.inspect.known_programs import PROGRAMS, program_named
from tests.inspect.meshes import mesh_of, shape_on

RING = [(source_device, (source_device + 1) % 4) for source_device in range(4)]


def collectives(program_call: ProgramCall) -> list[dict[str, Any]]:
    report = communication(program_call.function, *program_call.arguments, mesh=program_call.mesh)
    results: list[dict[str, Any]] = report.to_dict()["collectives"]
    return results


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_a_program_sends_the_expected_collectives(program: Program) -> None:
    results = collectives(program.build())
    counts, expected = reported_counts(results), expected_counts(program.expected)
    if program.merged:
        assert totals(counts) == totals(expected)
    else:
        assert counts == expected
    assert all(collective["at_least"] == program.at_least for collective in results)
    # On CPU devices every collective blocks.
    assert not any(collective["asynchronous"] for collective in results)


def test_programs_are_many_and_differ_in_name() -> None:
    names = [program.name for program in PROGRAMS]
    assert len(names) >= 40
    assert len(set(names)) == len(names)


# Source lines -----------------------------------------------------------------------------------


def line_of(marker: str) -> str:
    """Return `file.py:LINE` of this file's only line that ends in a comment with the marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (line_number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))
    return f"{Path(__file__).name}:{line_number}"


def sum_over_y(x: jax.Array) -> jax.Array:
    return lax.psum(x, "Y")  # the sum


def gather_then_sum(x: jax.Array) -> jax.Array:
    gathered = lax.all_gather(x, "X", tiled=True)  # the gather
    return sum_over_y(jnp.tanh(gathered)) * 2


def in_a_scan(x: jax.Array) -> jax.Array:
    def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        permuted = lax.ppermute(c, "Y", RING)  # the hop
        return jnp.sin(permuted), None

    return lax.scan(step, x, length=3)[0]


def differentiated(x: jax.Array) -> jax.Array:
    def loss(x: jax.Array) -> jax.Array:
        gathered = lax.all_gather(x, "Y", tiled=True)  # the gather whose gradient scatters
        return jnp.sin(gathered).sum()

    return jax.grad(loss)(x)


def on_a_grid(body: Callable[[jax.Array], jax.Array]) -> ProgramCall:
    mesh = mesh_of((2, 4))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("X", "Y"), out_specs=P("X", "Y"))
    return ProgramCall(mapped, (shape_on(mesh, (64, 128), P("X", "Y")),), mesh)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (gather_then_sum, {"all-gather": "the gather", "all-reduce": "the sum"}),
        (in_a_scan, {"collective-permute": "the hop"}),
        (
            differentiated,
            {
                "all-gather": "the gather whose gradient scatters",
                "reduce-scatter": "the gather whose gradient scatters",
            },
        ),
    ],
    ids=["called functions", "scan", "gradient"],
)
def test_a_collective_comes_from_the_line_that_calls_it(
    body: Callable[[jax.Array], jax.Array], expected: dict[str, str]
) -> None:
    sources = {results["kind"]: results["source"] for results in collectives(on_a_grid(body))}
    assert sources.keys() == expected.keys()
    for kind, marker in expected.items():
        assert sources[kind].endswith(f"/{line_of(marker)}"), kind


def test_a_collective_of_a_sharding_comes_from_the_line_that_needs_it() -> None:
    mesh = mesh_of((2, 4))

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w  # the product
        return jnp.tanh(y)

    function = jax.jit(matmul, out_shardings=NamedSharding(mesh, P("X")))
    x, w = shape_on(mesh, (64, 128), P("X", "Y")), shape_on(mesh, (128, 64), P("Y"))
    (results,) = collectives(ProgramCall(function, (x, w), mesh))
    assert results["source"].endswith(f"/{line_of('the product')}")


def test_name_scopes_are_reported() -> None:
    def body(x: jax.Array) -> jax.Array:
        with jax.named_scope("block_3"):
            with jax.named_scope("attention"):
                x = jnp.tanh(lax.ppermute(x, "Y", RING))
            with jax.named_scope("feedforward"):
                return x + lax.psum(x, "Y")

    scopes = {results["kind"]: results["scope"] for results in collectives(on_a_grid(body))}
    assert "attention" in scopes["collective-permute"]
    assert "feedforward" not in scopes["collective-permute"]
    assert "feedforward" in scopes["all-reduce"]
    assert "attention" not in scopes["all-reduce"]
    assert all("block_3" in scope for scope in scopes.values())


def test_a_gradient_keeps_the_scope_of_the_differentiated_operation() -> None:
    def body(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            with jax.named_scope("attention"):
                return jnp.sin(lax.all_gather(x, "Y", tiled=True)).sum()

        return jax.grad(loss)(x)

    results = collectives(on_a_grid(body))
    assert {"all-gather", "reduce-scatter"} == {collective["kind"] for collective in results}
    assert all("attention" in collective["scope"] for collective in results)


# The forms of a program -------------------------------------------------------------------------

EXAMPLES = [
    "psum, outer axes of three, named in the other order",
    "bfloat16: all_gather",
    "jit: bfloat16 contraction",
    "scan in a scan",
    "explicit: rows become columns",
]


def jitted(program_call: ProgramCall) -> Any:
    return (
        program_call.function
        if hasattr(program_call.function, "lower")
        else jax.jit(program_call.function)
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_jitted_and_lowered_programs_are_reported_as_the_function_is(name: str) -> None:
    program = program_named(name)
    program_call = program.build()
    lowered = jitted(program_call).lower(*program_call.arguments)
    for candidate in (jitted(program_call), program_call.function):
        report = communication(candidate, *program_call.arguments, mesh=program_call.mesh)
        assert reported_counts(report.to_dict()["collectives"]) == expected_counts(program.expected)
    lowered_report = communication(lowered, mesh=program_call.mesh).to_dict()["collectives"]
    assert reported_counts(lowered_report) == expected_counts(program.expected)


# A program compiled for CPU devices has lost its bfloat16 types.
@pytest.mark.parametrize("name", [name for name in EXAMPLES if "bfloat16" not in name])
def test_a_compiled_program_is_reported_as_the_function_is(name: str) -> None:
    program = program_named(name)
    program_call = program.build()
    compiled = jitted(program_call).lower(*program_call.arguments).compile()
    results = communication(compiled, mesh=program_call.mesh).to_dict()["collectives"]
    assert reported_counts(results) == expected_counts(program.expected)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_mesh_is_taken_from_the_arguments(name: str) -> None:
    program = program_named(name)
    program_call = program.build()
    report = communication(program_call.function, *program_call.arguments)
    assert reported_counts(report.to_dict()["collectives"]) == expected_counts(program.expected)


@pytest.mark.parametrize("name", EXAMPLES)
def test_arrays_give_the_same_report_as_their_shapes(name: str) -> None:
    program = program_named(name)
    program_call = program.build()
    rng = np.random.default_rng(0)
    arrays = [
        jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding)
        for a in program_call.arguments
    ]
    report = communication(program_call.function, *arrays, mesh=program_call.mesh)
    assert reported_counts(report.to_dict()["collectives"]) == expected_counts(program.expected)


def test_arguments_may_be_trees() -> None:
    mesh = mesh_of((8,))

    def loss(weights: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return (batch["x"] @ weights["w"]).sum()

    function = jax.jit(loss, out_shardings=NamedSharding(mesh, P()))
    weights = {"w": shape_on(mesh, (128, 32), P())}
    batch = {"x": shape_on(mesh, (64, 128), P("X"))}
    report = communication(function, weights, batch, mesh=mesh)
    assert reported_counts(report.to_dict()["collectives"]) == {all_reduce("X", 8, 4).key: 1}


def test_the_program_is_not_run(capfd: pytest.CaptureFixture[str]) -> None:
    def body(x: jax.Array) -> jax.Array:
        jax.debug.print("this program ran")
        return lax.psum(x, "Y")

    assert len(collectives(on_a_grid(body))) == 1
    jax.effects_barrier()
    assert "this program ran" not in "".join(capfd.readouterr())


def test_a_mesh_larger_than_the_machine_needs_only_shapes() -> None:
    # x[B_X, D_Y] · w[D_Y, F] on 256 devices: each has a (16, 128) term, summed over 16 of them.
    mesh = AbstractMesh((16, 16), ("X", "Y"), (AxisType.Auto, AxisType.Auto))
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    x = shape((256, 512), sharding=NamedSharding(mesh, P("X", "Y")))
    w = shape((512, 128), sharding=NamedSharding(mesh, P("Y")))

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    function = jax.jit(matmul, out_shardings=NamedSharding(mesh, P("X")))
    results = communication(function, x, w, mesh=mesh).to_dict()["collectives"]
    assert reported_counts(results) == {all_reduce("Y", 16, 16 * 128 * 4).key: 1}
