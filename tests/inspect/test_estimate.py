"""`estimate` and `compare` on programs with known cost."""

# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.chips import UnknownName, price, slice_of, zone_offers
from drumline.errors import UserError
from drumline.inspect import Estimate, ProgramVariant, compare, estimate

MESH = AbstractMesh((2, 4), ("X", "Y"), (AxisType.Auto, AxisType.Auto))
shape = jax.ShapeDtypeStruct


def on_mesh(dims: tuple[int, ...], spec: P, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return shape(dims, dtype, sharding=NamedSharding(MESH, spec))


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def gather_then_matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.all_gather(x, "Y", axis=0, tiled=True) @ w


def estimate_of_gather() -> Estimate:
    """Estimate x gathered along Y before a matmul: 1024 rows of 4096 from each of four devices."""
    function = jax.shard_map(
        gather_then_matmul, mesh=MESH, in_specs=(P("Y"), P()), out_specs=P(), check_vma=False
    )
    x, w = on_mesh((4096, 4096), P("Y")), on_mesh((4096, 4096), P())
    return estimate(function, x, w, on="v5litepod-8", compiler="cpu")


def estimate_on_one_chip(function: Any, *arguments: Any) -> Estimate:
    return estimate(function, *arguments, on="v5litepod-1", compiler="cpu")


def test_a_large_matmul_nearly_reaches_the_peak() -> None:
    side = shape((8192, 8192), jnp.bfloat16)
    report = estimate_on_one_chip(matmul, side, side)
    assert report.bound == "compute"
    assert report.flops == report.model_flops == 2 * 8192**3
    assert 0.94 < report.mfu <= 0.98
    assert report.seconds == pytest.approx(2 * 8192**3 / 1.97e14 / report.mfu)
    assert report.communication == ()
    assert (report.exposed, report.hidden, report.at_least, report.fits) == (0, 0, False, True)
    assert report.memory.arguments == 2 * 2 * 8192**2


def test_an_addition_is_bound_by_memory() -> None:
    report = estimate_on_one_chip(jnp.add, *[shape((8192, 8192), jnp.float32)] * 2)
    assert report.bound == "memory"
    assert report.mfu == 0
    assert report.seconds == pytest.approx(3 * 4 * 8192**2 / (8.2e11 * 0.92), rel=0.1)


def test_many_small_operations_are_bound_by_overhead() -> None:
    def small_matmuls(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = x @ x
        return x

    assert estimate_on_one_chip(small_matmuls, shape((64, 64), jnp.float32)).bound == "overhead"


def test_a_gather_that_a_matmul_needs_is_exposed() -> None:
    report = estimate_of_gather()
    gather = 3e-6 + 3 * (1024 * 4096 * 2 / (4.5e10 * 0.9) + 1e-6)
    (gather_estimate,) = report.communication
    assert (gather_estimate.kind, gather_estimate.axes, gather_estimate.count) == (
        "all-gather",
        ("Y",),
        1,
    )
    assert gather_estimate.exposed == gather_estimate.seconds == pytest.approx(gather)
    assert report.exposed == pytest.approx(gather)
    assert report.bounds["network"] == pytest.approx(gather)
    assert report.seconds == pytest.approx(sum(report.bounds.values()))
    assert report.axis_links == {"X": "line of 2", "Y": "line of 4"}
    assert "waits for all-gather over Y at test_estimate.py" in str(report)


def test_a_gather_that_nothing_needs_is_hidden() -> None:
    def gather_beside_matmul(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.all_gather(x, "Y", axis=0, tiled=True), w @ w

    function = jax.shard_map(
        gather_beside_matmul,
        mesh=MESH,
        in_specs=(P("Y"), P()),
        out_specs=(P(), P()),
        check_vma=False,
    )
    x, w = on_mesh((512, 512), P("Y")), on_mesh((8192, 8192), P())
    report = estimate(function, x, w, on="v5litepod-8", compiler="cpu")
    assert report.exposed == 0
    assert report.hidden > 0
    assert "all hidden" in str(report)


def test_recomputation_counts_for_time_but_not_for_mfu() -> None:
    def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(jax.checkpoint(block), x, w)[0].astype(jnp.float32).sum()

    x, w = shape((1024, 512), jnp.bfloat16), shape((3, 512, 512), jnp.bfloat16)
    report = estimate_on_one_chip(jax.value_and_grad(loss, argnums=(0, 1)), x, w)
    forward = 3 * 2 * (2 * 1024 * 512 * 512)
    assert report.model_flops == 3 * forward, "forward, and twice that backward"
    assert report.flops == 4 * forward, "and the recomputed forward pass"
    assert report.mfu == pytest.approx(report.model_flops / report.seconds / 1.97e14)


def test_the_iterations_of_a_scan_are_counted() -> None:
    def scan_of_matmuls(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    report = estimate_on_one_chip(
        scan_of_matmuls, shape((512, 512), jnp.bfloat16), shape((7, 512, 512), jnp.bfloat16)
    )
    assert report.flops == 7 * 2 * 512**3
    assert not report.at_least


def test_a_loop_of_unknown_length_is_reported_as_at_least() -> None:
    def unbounded_loop(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x.sum() < 1e6, lambda x: x @ x, x)

    report = estimate_on_one_chip(unbounded_loop, shape((512, 512), jnp.float32))
    assert report.at_least
    assert "at least" in str(report).splitlines()[0]


def test_a_program_that_does_not_fit_is_reported() -> None:
    report = estimate_on_one_chip(jnp.add, *[shape((65536, 65536), jnp.float32)] * 2)
    assert not report.fits
    assert report.memory.arguments == 2 * 4 * 65536**2
    assert "does NOT fit" in str(report)


@pytest.mark.parametrize("donated", [(), (0,)], ids=["kept", "donated"])
def test_the_memory_of_a_step_is_near_the_compiler_s_own_account(donated: tuple[int, ...]) -> None:
    def step(weights: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return (h**2).sum()

        gradients = jax.grad(loss)(weights)
        return [w - 0.1 * gradient for w, gradient in zip(weights, gradients, strict=True)]

    weights, x = [shape((256, 256), jnp.float32)] * 6, shape((1024, 256), jnp.float32)
    function = jax.jit(step, donate_argnums=donated)
    compiler_memory: Any = function.lower(weights, x).compile().memory_analysis()
    report = estimate_on_one_chip(function, weights, x).memory
    assert report.arguments == compiler_memory.argument_size_in_bytes
    assert report.outputs == pytest.approx(
        compiler_memory.output_size_in_bytes - compiler_memory.alias_size_in_bytes, abs=64
    )
    assert report.temporaries == pytest.approx(compiler_memory.temp_size_in_bytes, rel=0.25)


@pytest.mark.parametrize(
    "make_report", [estimate_of_gather, lambda: estimate_on_one_chip(jnp.sin, jnp.ones((8,)))]
)
def test_a_report_has_at_most_ten_lines_and_converts_to_json(
    make_report: Callable[[], Estimate],
) -> None:
    report = make_report()
    lines = str(report).splitlines()
    assert 3 <= len(lines) <= 10
    assert lines[0].startswith(f"{report.name}: ")
    assert report.on in lines[0]
    parsed = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert parsed["seconds"] == report.seconds
    assert parsed["memory"]["total"] == report.memory.total
    assert sum(operation["seconds"] for operation in parsed["operations"]) + parsed[
        "exposed_seconds"
    ] == (pytest.approx(report.seconds))


def test_lowered_and_compiled_programs_are_estimated_too() -> None:
    side = shape((512, 512), jnp.float32)
    lowered = jax.jit(matmul).lower(side, side)
    of_function = estimate_on_one_chip(matmul, side, side)
    assert estimate_on_one_chip(lowered).flops == of_function.flops
    assert estimate_on_one_chip(lowered.compile()).flops == of_function.flops


def test_a_mesh_as_text_shards_the_arguments() -> None:
    x: Any = partial(shape, dtype=jnp.bfloat16)
    report = estimate(
        matmul,
        x((1024, 2048), sharding=P("X", "Y")),
        x((2048, 8192), sharding=P(None, "Y")),
        on="v5litepod-8",
        mesh="X=2,Y=4",
        compiler="cpu",
    )
    assert report.mesh == {"X": 2, "Y": 4}
    assert [(collective.kind, collective.axes) for collective in report.communication] == [
        ("all-gather", ("Y",))
    ]


# Refusals ----------------------------------------------------------------------------------------


def invalid_matmul(x: jax.Array) -> jax.Array:
    return x @ jnp.ones((3, 3))


REFUSALS: dict[str, tuple[Callable[[], Estimate], str]] = {
    "unknown slice": (lambda: estimate(jnp.sin, 1.0, on="v9-8"), "v9-8"),
    "no number of slices": (lambda: estimate(jnp.sin, 1.0, on="0xv6e-8"), "1 or more"),
    "a mesh that the slice has no room for": (
        lambda: estimate(jnp.sin, on_mesh((8, 8), P("X")), on="v5litepod-4", compiler="cpu"),
        "the mesh X=2,Y=4 has 8 devices and v5litepod-4 has 4",
    ),
    "one device on a slice of eight": (
        lambda: estimate(jnp.sin, shape((8,), jnp.float32), on="v5litepod-8", compiler="cpu"),
        "has 1 device and v5litepod-8 has 8",
    ),
    "a mesh that does not divide the arguments": (
        lambda: estimate(
            jnp.sin,
            jax.ShapeDtypeStruct((10, 8), jnp.float32, sharding=P("Y")),
            on="v5litepod-8",
            mesh="X=2,Y=4",
        ),
        "argument 1 of shape (10, 8): dimension 0 of 10 does not divide by the 4 devices along Y",
    ),
    "a function that does not trace": (
        lambda: estimate_on_one_chip(invalid_matmul, shape((4, 4), jnp.float32)),
        "invalid_matmul does not trace: TypeError",
    ),
    "no function": (
        lambda: estimate_on_one_chip(3, shape((4,), jnp.float32)),
        "3 is not a function",
    ),
    "a mesh that is none": (
        lambda: estimate(jnp.sin, 1.0, on="v5litepod-8", mesh="2x4"),
        "the mesh '2x4': write each axis as NAME=SIZE",
    ),
    "the TPU's compiler where it is not": (
        lambda: estimate(jnp.sin, 1.0, on="v5litepod-1", compiler="tpu"),
        "the TPU's compiler is not installed here",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_an_error_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.inspect.compiling.programs.has_tpu_compiler", lambda: False)
    call, expected_text = REFUSALS[name]
    with pytest.raises((UserError, UnknownName)) as error_info:
        call()
    message = str(error_info.value)
    assert expected_text in message
    assert "\n" not in message
    assert "Traceback" not in message


def test_a_function_that_does_not_trace_is_reported_with_its_own_line() -> None:
    with pytest.raises(UserError, match=r"at .*test_estimate\.py:\d+$"):
        estimate_on_one_chip(invalid_matmul, shape((4, 4), jnp.float32))


# Comparisons -------------------------------------------------------------------------------------


def data_parallel(devices: int) -> tuple[Any, ...]:
    """Return rows of x over all devices, and a replicated w."""
    mesh = AbstractMesh((devices,), ("X",), (AxisType.Auto,))
    x = shape((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P("X")))
    return x, shape((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P()))


def contracted(devices: int) -> tuple[Any, ...]:
    """Return operands sharded over the contracted dimension, whose terms are summed over the
    network.
    """
    mesh = AbstractMesh((devices,), ("X",), (AxisType.Auto,))
    x = shape((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "X")))
    return x, shape((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P("X")))


VARIANTS = {"data": data_parallel, "contracted": contracted}


def test_variants_made_for_a_number_of_devices_are_ordered_by_time() -> None:
    report = compare(matmul, VARIANTS, ["v5litepod-4", "v5litepod-8"], compiler="cpu")
    assert len(report.choices) == 4
    seconds = [choice.estimate.seconds for choice in report.choices if choice.estimate is not None]
    assert seconds == sorted(seconds)
    assert report.best is not None
    assert (report.best.variant, report.best.on) == ("data", "v5litepod-8")
    exposed = {c.variant: c.estimate.exposed for c in report.choices if c.estimate is not None}
    assert exposed["data"] == 0
    assert exposed["contracted"] > 0
    lines = str(report).splitlines()
    assert len(lines) == 1 + 4 + 2
    assert "  100 %  " in lines[1], "no matmul was measured on v5e"
    json.dumps(report.to_dict(), allow_nan=False)


def test_the_cheapest_is_by_the_dollars_of_a_call() -> None:
    report = compare(matmul, VARIANTS, ["v5litepod-4", "v5litepod-8"], compiler="cpu")
    tpu_slice = slice_of("v5litepod-8")
    public = [offer for offer in zone_offers(tpu_slice) if offer.public]
    listed = [price(tpu_slice, offer.zone, "spot") for offer in public]
    rate = min(one.per_chip_hour for one in listed if one is not None) * 8 / 3600
    by_name = {(choice.variant, choice.on): choice for choice in report.choices}
    data_choice = by_name["data", "v5litepod-8"]
    assert data_choice.estimate is not None
    assert data_choice.dollars is not None
    assert data_choice.dollars == pytest.approx(rate * data_choice.estimate.seconds)
    priced = [choice.dollars for choice in report.choices if choice.dollars is not None]
    assert report.cheapest is not None
    assert report.cheapest.dollars == min(priced)
    on_demand = compare(matmul, VARIANTS, "v5litepod-8", tier="on-demand", compiler="cpu")
    assert on_demand.best is not None
    assert on_demand.best.dollars is not None
    assert on_demand.best.dollars > data_choice.dollars
    assert "on-demand" in str(on_demand)


def test_prices_are_those_of_the_zones_that_the_user_may_use() -> None:
    tpu_slice = slice_of("v5litepod-8")
    mine = ("us-west4-b", "europe-west4-a", "us-central2-b")
    report = compare(matmul, VARIANTS, ["v5litepod-8"], compiler="cpu", zones=mine)
    rates = [price(tpu_slice, zone, "spot") for zone in mine[:2]]
    lowest = min(rate.per_chip_hour for rate in rates if rate is not None)
    best = report.best
    assert best is not None
    assert best.estimate is not None
    assert best.zone in mine
    assert best.dollars == pytest.approx(lowest * 8 / 3600 * best.estimate.seconds)
    assert best.zone in str(report).splitlines()[1]
    assert report.to_dict()["choices"][0]["zone"] == best.zone
    nowhere = compare(matmul, VARIANTS, ["v5litepod-8"], compiler="cpu", zones=("us-central2-b",))
    assert nowhere.best is not None
    assert (nowhere.best.dollars, nowhere.best.zone) == (None, None)


def test_variants_are_ordered_by_fit_and_failures_come_last() -> None:
    def too_large(devices: int) -> tuple[Any, ...]:
        del devices
        return (shape((65536, 65536), jnp.bfloat16),) * 2

    def broken_function(*_: jax.Array) -> jax.Array:
        raise ValueError("this layout has none")

    small = (shape((4096, 4096), jnp.float32),) * 2
    report = compare(
        jnp.add,
        {
            "broken": ProgramVariant("broken", small, function=broken_function),
            "large": too_large,
            "small": small,
        },
        "v5litepod-1",
        compiler="cpu",
    )
    assert [choice.variant for choice in report.choices] == ["small", "large", "broken"]
    assert report.best is report.choices[0]
    assert report.choices[1].estimate is not None
    assert not report.choices[1].estimate.fits
    assert report.choices[2].estimate is None
    assert "this layout has none" in report.choices[2].reason
    assert "broken on v5litepod-1: broken_function does not trace" in str(report)


def test_there_is_no_best_variant_if_none_fits() -> None:
    large_arguments = (shape((65536, 65536), jnp.bfloat16),) * 2
    report = compare(jnp.add, {"large": large_arguments}, "v5litepod-1", compiler="cpu")
    assert report.best is None
    assert report.cheapest is None


def test_a_variant_that_fits_only_one_slice_is_reported() -> None:
    report = compare(
        matmul,
        [ProgramVariant("four", data_parallel(4))],
        ["v5litepod-8", "v5litepod-4"],
        compiler="cpu",
    )
    assert [choice.on for choice in report.choices] == ["v5litepod-4", "v5litepod-8"]
    assert "has 4 devices and v5litepod-8 has 8" in report.choices[1].reason


@pytest.mark.parametrize(
    ("layouts", "on", "tier", "expected_text"),
    [
        ({}, ["v5litepod-4"], "spot", "nothing to compare"),
        (VARIANTS, [], "spot", "nothing to compare"),
        (VARIANTS, ["v9-8"], "spot", "v9-8"),
        (VARIANTS, ["v5litepod-4"], "gratis", "gratis"),
    ],
)
def test_an_invalid_comparison_is_rejected(
    layouts: dict[str, Any], on: list[str], tier: str, expected_text: str
) -> None:
    with pytest.raises((UserError, UnknownName), match=expected_text) as error_info:
        compare(matmul, layouts, on, tier=tier)
    assert "\n" not in str(error_info.value)
