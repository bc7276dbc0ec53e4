"""`communication` tells of every known program what theory says: kinds, axes, types, bytes, counts.

And whatever it is given of a program, a function, a lowered or a compiled one, arrays or their
shapes, the answer is the same.
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
    Built,
    Program,
    all_reduce,
    expected_counts,
    told_counts,
    totals,
)
from tests.inspect.known_programs import PROGRAMS, known
from tests.inspect.meshes import mesh_of, shape_on

RING = [(here, (here + 1) % 4) for here in range(4)]


def collectives(built: Built) -> list[dict[str, Any]]:
    report = communication(built.function, *built.arguments, mesh=built.mesh)
    results: list[dict[str, Any]] = report.to_dict()["collectives"]
    return results


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_what_a_program_sends_is_what_theory_says(program: Program) -> None:
    results = collectives(program.build())
    counts, expected = told_counts(results), expected_counts(program.expected)
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


# Where they come from ---------------------------------------------------------------------------


def line_of(marker: str) -> str:
    """`file.py:LINE` of this file's one line that ends in a comment with the marker."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if line.endswith(f"# {marker}"))
    return f"{Path(__file__).name}:{number}"


def summed(x: jax.Array) -> jax.Array:
    return lax.psum(x, "Y")  # the sum


def gathered_then_summed(x: jax.Array) -> jax.Array:
    total = lax.all_gather(x, "X", tiled=True)  # the gather
    return summed(jnp.tanh(total)) * 2


def in_a_scan(x: jax.Array) -> jax.Array:
    def step(c: jax.Array, _: None) -> tuple[jax.Array, None]:
        moved = lax.ppermute(c, "Y", RING)  # the hop
        return jnp.sin(moved), None

    return lax.scan(step, x, length=3)[0]


def differentiated(x: jax.Array) -> jax.Array:
    def loss(x: jax.Array) -> jax.Array:
        total = lax.all_gather(x, "Y", tiled=True)  # the gather whose gradient scatters
        return jnp.sin(total).sum()

    return jax.grad(loss)(x)


def on_a_grid(body: Callable[[jax.Array], jax.Array]) -> Built:
    mesh = mesh_of((2, 4))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("X", "Y"), out_specs=P("X", "Y"))
    return Built(mapped, (shape_on(mesh, (64, 128), P("X", "Y")),), mesh)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (gathered_then_summed, {"all-gather": "the gather", "all-reduce": "the sum"}),
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

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w  # the product
        return jnp.tanh(y)

    function = jax.jit(product, out_shardings=NamedSharding(mesh, P("X")))
    x, w = shape_on(mesh, (64, 128), P("X", "Y")), shape_on(mesh, (128, 64), P("Y"))
    (results,) = collectives(Built(function, (x, w), mesh))
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


def test_a_gradient_keeps_the_scope_of_what_it_differentiates() -> None:
    def body(x: jax.Array) -> jax.Array:
        def loss(x: jax.Array) -> jax.Array:
            with jax.named_scope("attention"):
                return jnp.sin(lax.all_gather(x, "Y", tiled=True)).sum()

        return jax.grad(loss)(x)

    results = collectives(on_a_grid(body))
    assert {"all-gather", "reduce-scatter"} == {collective["kind"] for collective in results}
    assert all("attention" in collective["scope"] for collective in results)


# The same, whatever of it is given --------------------------------------------------------------

VARIED = [
    "psum, outer axes of three, named in the other order",
    "bfloat16: all_gather",
    "jit: bfloat16 contraction",
    "scan in a scan",
    "explicit: rows become columns",
]


def jitted(built: Built) -> Any:
    return built.function if hasattr(built.function, "lower") else jax.jit(built.function)


@pytest.mark.parametrize("name", VARIED)
def test_jitted_and_lowered_programs_are_reported_as_the_function_is(name: str) -> None:
    program = known(name)
    built = program.build()
    lowered = jitted(built).lower(*built.arguments)
    for candidate in (jitted(built), built.function):
        report = communication(candidate, *built.arguments, mesh=built.mesh)
        assert told_counts(report.to_dict()["collectives"]) == expected_counts(program.expected)
    of_lowered = communication(lowered, mesh=built.mesh).to_dict()["collectives"]
    assert told_counts(of_lowered) == expected_counts(program.expected)


# A program that is compiled already for CPU devices has lost what was bfloat16 in it.
@pytest.mark.parametrize("name", [name for name in VARIED if "bfloat16" not in name])
def test_a_compiled_program_is_reported_as_the_function_is(name: str) -> None:
    program = known(name)
    built = program.build()
    compiled = jitted(built).lower(*built.arguments).compile()
    results = communication(compiled, mesh=built.mesh).to_dict()["collectives"]
    assert told_counts(results) == expected_counts(program.expected)


@pytest.mark.parametrize("name", VARIED)
def test_the_mesh_is_found_in_the_arguments(name: str) -> None:
    program = known(name)
    built = program.build()
    report = communication(built.function, *built.arguments)
    assert told_counts(report.to_dict()["collectives"]) == expected_counts(program.expected)


@pytest.mark.parametrize("name", VARIED)
def test_arrays_do_as_well_as_their_shapes(name: str) -> None:
    program = known(name)
    built = program.build()
    rng = np.random.default_rng(0)
    arrays = [
        jax.device_put(rng.normal(size=a.shape).astype(a.dtype), a.sharding)
        for a in built.arguments
    ]
    report = communication(built.function, *arrays, mesh=built.mesh)
    assert told_counts(report.to_dict()["collectives"]) == expected_counts(program.expected)


def test_arguments_may_be_trees() -> None:
    mesh = mesh_of((8,))

    def loss(weights: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        return (batch["x"] @ weights["w"]).sum()

    function = jax.jit(loss, out_shardings=NamedSharding(mesh, P()))
    weights = {"w": shape_on(mesh, (128, 32), P())}
    batch = {"x": shape_on(mesh, (64, 128), P("X"))}
    report = communication(function, weights, batch, mesh=mesh)
    assert told_counts(report.to_dict()["collectives"]) == {all_reduce("X", 8, 4).key: 1}


def test_nothing_is_run(capfd: pytest.CaptureFixture[str]) -> None:
    def body(x: jax.Array) -> jax.Array:
        jax.debug.print("this program ran")
        return lax.psum(x, "Y")

    assert len(collectives(on_a_grid(body))) == 1
    jax.effects_barrier()
    assert "this program ran" not in "".join(capfd.readouterr())


def test_a_mesh_larger_than_the_machine_needs_only_shapes() -> None:
    # x[B_X, D_Y] · w[D_Y, F] on 256 devices: a (16, 128) term on each, summed over 16 of them.
    mesh = AbstractMesh((16, 16), ("X", "Y"), (AxisType.Auto, AxisType.Auto))
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    x = shape((256, 512), sharding=NamedSharding(mesh, P("X", "Y")))
    w = shape((512, 128), sharding=NamedSharding(mesh, P("Y")))

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ w

    function = jax.jit(product, out_shardings=NamedSharding(mesh, P("X")))
    results = communication(function, x, w, mesh=mesh).to_dict()["collectives"]
    assert told_counts(results) == {all_reduce("Y", 16, 16 * 128 * 4).key: 1}
