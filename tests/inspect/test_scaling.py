"""Programs for more devices than can be compiled for are extrapolated as if compiled directly."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.errors import UserError
from drumline.inspect import Communication, Estimate, communication, estimate
from drumline.inspect.compiling import programs
from drumline.inspect.compiling.scaling import shorter_meshes
from tests.inspect.expected import reported_counts

shape = jax.ShapeDtypeStruct


def mesh_of(**sizes: int) -> AbstractMesh:
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), (AxisType.Auto,) * len(sizes))


def shape_on_mesh(mesh: AbstractMesh, dims: tuple[int, ...], *spec: Any) -> jax.ShapeDtypeStruct:
    return shape(dims, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))


ProgramCall = tuple[Callable[..., Any], tuple[Any, ...]]


def gathers_weights(mesh: AbstractMesh) -> ProgramCall:
    """Return rows of the batch and of every layer's weights over X, in a scan over three layers."""

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0].astype(jnp.float32).sum()

    function = jax.jit(
        jax.value_and_grad(loss),
        out_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "X"))),
    )
    return function, (
        shape_on_mesh(mesh, (3, 512, 512), None, "X"),
        shape_on_mesh(mesh, (4096, 512), "X"),
    )


def splits_features(mesh: AbstractMesh) -> ProgramCall:
    """Return the batch over X, and the inner features over Y."""

    def block(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.tanh(x @ up) @ down

    function = jax.jit(block, out_shardings=NamedSharding(mesh, P("X")))
    arguments = (
        shape_on_mesh(mesh, (2048, 256), "X"),
        shape_on_mesh(mesh, (256, 512), None, "Y"),
        shape_on_mesh(mesh, (512, 256), "Y"),
    )
    return function, arguments


def report_and_estimate(
    build: Callable[[AbstractMesh], ProgramCall], mesh: AbstractMesh
) -> tuple[Any, ...]:
    function, arguments = build(mesh)
    sent = communication(function, *arguments, compiler="cpu")
    step_estimate = estimate(function, *arguments, on="v5p-256", compiler="cpu")
    return sent, step_estimate


@pytest.mark.parametrize(
    ("build", "mesh"),
    [(gathers_weights, mesh_of(X=128)), (splits_features, mesh_of(X=32, Y=4))],
    ids=["weights gathered over 128", "features split over 32×4"],
)
def test_an_extrapolated_program_equals_a_compiled_one(
    build: Callable[[AbstractMesh], ProgramCall],
    mesh: AbstractMesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    direct: Communication
    direct_estimate: Estimate
    direct, direct_estimate = report_and_estimate(build, mesh)
    assert direct.collectives
    assert "and extrapolated" not in direct.compiled_by
    monkeypatch.setattr(programs, "MAX_DEVICES", 64)
    extrapolated, step_estimate = report_and_estimate(build, mesh)
    assert "and extrapolated" in extrapolated.compiled_by
    assert (extrapolated.devices, extrapolated.mesh) == (direct.devices, direct.mesh)
    results, expected = (report.to_dict()["collectives"] for report in (extrapolated, direct))
    assert reported_counts(results) == reported_counts(expected)
    assert [collective["group"] for collective in results] == [
        collective["group"] for collective in expected
    ]
    assert extrapolated.sent == direct.sent
    assert step_estimate.seconds == direct_estimate.seconds
    assert step_estimate.bounds == direct_estimate.bounds
    assert step_estimate.flops == direct_estimate.flops
    assert step_estimate.exposed == direct_estimate.exposed
    assert step_estimate.memory == direct_estimate.memory


def error_message(function: Any, *arguments: Any) -> str:
    with pytest.raises(UserError) as error_info:
        communication(function, *arguments, compiler="cpu")
    message = str(error_info.value)
    assert "\n" not in message
    return message


@pytest.fixture
def few_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "MAX_DEVICES", 64)


@pytest.mark.usefixtures("few_devices")
def test_a_shard_map_is_rejected() -> None:
    mesh = mesh_of(X=128)
    function = jax.shard_map(lambda x: lax.psum(x, "X"), mesh=mesh, in_specs=P("X"), out_specs=P())
    assert "shard_map fixes what each device has" in error_message(
        function, shape_on_mesh(mesh, (256, 8), "X")
    )


@pytest.mark.usefixtures("few_devices")
def test_a_program_that_xla_shards_differently_is_rejected() -> None:
    mesh = mesh_of(X=128)

    # 16 devices divide these rows, but more devices do not, so the rows need padding or transfers.
    def rows(x: jax.Array) -> jax.Array:
        y = x.reshape(-1, 24, 64)
        y = lax.with_sharding_constraint(y, NamedSharding(mesh, P(None, "X")))
        return lax.with_sharding_constraint(y.sum(0), NamedSharding(mesh, P("X")))

    message = error_message(jax.jit(rows), shape_on_mesh(mesh, (128 * 24, 64), "X"))
    assert message.startswith("XLA makes different programs for X=16 and X=64")


@pytest.mark.usefixtures("few_devices")
def test_a_mesh_without_a_long_axis_is_rejected() -> None:
    mesh = mesh_of(X=8, Y=4, Z=4)

    def summed(x: jax.Array) -> jax.Array:
        return x.sum()

    function = jax.jit(summed, out_shardings=NamedSharding(mesh, P()))
    message = error_message(function, shape_on_mesh(mesh, (64, 64), "X", "Y"))
    assert message.startswith("the mesh X=8,Y=4,Z=4 has 128 devices, more than the 64")


def test_the_longest_axis_is_shortened_to_its_divisors() -> None:
    assert shorter_meshes({"X": 1024, "Y": 4}, 2048) == [
        {"X": 128, "Y": 4},
        {"X": 256, "Y": 4},
        {"X": 512, "Y": 4},
    ]
    assert [mesh["X"] for mesh in shorter_meshes({"X": 4480}, 2048)] == [640, 896, 1120]
    with pytest.raises(UserError, match="no axis that can be shortened enough"):
        shorter_meshes({"X": 4099}, 2048)


@pytest.mark.parametrize("device_count", [4096, 8960])
def test_a_whole_pod_is_reported(device_count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of a gradient over every device follows from the data's sharding."""
    monkeypatch.setattr(programs, "MAX_DEVICES", 256)
    mesh = mesh_of(X=device_count)

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.einsum("bd,bf->df", x, w)

    function = jax.jit(product, out_shardings=NamedSharding(mesh, P()))
    x = shape_on_mesh(mesh, (device_count * 8, 64), "X")
    report = communication(function, x, x, compiler="cpu")
    (results,) = report.collectives
    assert (results.kind, results.group, report.devices) == (
        "all-reduce",
        device_count,
        device_count,
    )
    assert results.sent == 2 * (device_count - 1) * (64 * 64 * 2) // device_count
