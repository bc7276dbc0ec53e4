"""`estimate` and `compare`, as a user calls them, on programs whose cost is known."""

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


def resize_mesh(dims: tuple[int, ...], spec: P, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return shape(dims, dtype, sharding=NamedSharding(MESH, spec))


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


def gathered(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.all_gather(x, "Y", axis=0, tiled=True) @ w


def told_of_gathered() -> Estimate:
    """x is gathered along Y before it is multiplied: 1024 rows of 4096 from each of four."""
    function = jax.shard_map(
        gathered, mesh=MESH, in_specs=(P("Y"), P()), out_specs=P(), check_vma=False
    )
    x, w = resize_mesh((4096, 4096), P("Y")), resize_mesh((4096, 4096), P())
    return estimate(function, x, w, on="v5litepod-8", compiler="cpu")


def one_chip(function: Any, *arguments: Any) -> Estimate:
    return estimate(function, *arguments, on="v5litepod-1", compiler="cpu")


def test_a_large_matmul_reaches_nearly_what_matmuls_reach() -> None:
    side = shape((8192, 8192), jnp.bfloat16)
    report = one_chip(product, side, side)
    assert report.bound == "compute"
    assert report.flops == report.model_flops == 2 * 8192**3
    assert 0.94 < report.mfu <= 0.98
    assert report.seconds == pytest.approx(2 * 8192**3 / 1.97e14 / report.mfu)
    assert report.communication == ()
    assert (report.exposed, report.hidden, report.at_least, report.fits) == (0, 0, False, True)
    assert report.memory.arguments == 2 * 2 * 8192**2


def test_an_addition_is_bound_by_memory() -> None:
    report = one_chip(jnp.add, *[shape((8192, 8192), jnp.float32)] * 2)
    assert report.bound == "memory"
    assert report.mfu == 0
    assert report.seconds == pytest.approx(3 * 4 * 8192**2 / (8.2e11 * 0.92), rel=0.1)


def test_many_little_operations_are_bound_by_starting_them() -> None:
    def little(x: jax.Array) -> jax.Array:
        for _ in range(6):
            x = x @ x
        return x

    assert one_chip(little, shape((64, 64), jnp.float32)).bound == "overhead"


def test_a_gather_that_a_matmul_needs_is_exposed() -> None:
    report = told_of_gathered()
    gather = 3e-6 + 3 * (1024 * 4096 * 2 / (4.5e10 * 0.9) + 1e-6)
    (waiting,) = report.communication
    assert (waiting.kind, waiting.axes, waiting.count) == ("all-gather", ("Y",), 1)
    assert waiting.exposed == waiting.seconds == pytest.approx(gather)
    assert report.exposed == pytest.approx(gather)
    assert report.bounds["network"] == pytest.approx(gather)
    assert report.seconds == pytest.approx(sum(report.bounds.values()))
    assert report.axis_links == {"X": "line of 2", "Y": "line of 4"}
    assert "waits for all-gather over Y at test_estimate.py" in str(report)


def test_a_gather_that_nothing_needs_is_hidden() -> None:
    def beside(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.all_gather(x, "Y", axis=0, tiled=True), w @ w

    function = jax.shard_map(
        beside, mesh=MESH, in_specs=(P("Y"), P()), out_specs=(P(), P()), check_vma=False
    )
    x, w = resize_mesh((512, 512), P("Y")), resize_mesh((8192, 8192), P())
    report = estimate(function, x, w, on="v5litepod-8", compiler="cpu")
    assert report.exposed == 0
    assert report.hidden > 0
    assert "all hidden" in str(report)


def test_what_is_computed_again_counts_for_time_and_not_for_mfu() -> None:
    def block(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.tanh(x @ w) @ w), None

    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(jax.checkpoint(block), x, w)[0].astype(jnp.float32).sum()

    x, w = shape((1024, 512), jnp.bfloat16), shape((3, 512, 512), jnp.bfloat16)
    report = one_chip(jax.value_and_grad(loss, argnums=(0, 1)), x, w)
    forward = 3 * 2 * (2 * 1024 * 512 * 512)
    assert report.model_flops == 3 * forward, "forward, and twice as much backward"
    assert report.flops == 4 * forward, "and forward again"
    assert report.mfu == pytest.approx(report.model_flops / report.seconds / 1.97e14)


def test_the_iterations_of_a_scan_are_counted() -> None:
    def scanned(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    report = one_chip(scanned, shape((512, 512), jnp.bfloat16), shape((7, 512, 512), jnp.bfloat16))
    assert report.flops == 7 * 2 * 512**3
    assert not report.at_least


def test_a_loop_of_unknown_length_is_said_to_take_at_least() -> None:
    def searched(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x.sum() < 1e6, lambda x: x @ x, x)

    report = one_chip(searched, shape((512, 512), jnp.float32))
    assert report.at_least
    assert "at least" in str(report).splitlines()[0]


def test_what_does_not_fit_is_said() -> None:
    report = one_chip(jnp.add, *[shape((65536, 65536), jnp.float32)] * 2)
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

        slopes = jax.grad(loss)(weights)
        return [w - 0.1 * slope for w, slope in zip(weights, slopes, strict=True)]

    weights, x = [shape((256, 256), jnp.float32)] * 6, shape((1024, 256), jnp.float32)
    function = jax.jit(step, donate_argnums=donated)
    account: Any = function.lower(weights, x).compile().memory_analysis()
    report = one_chip(function, weights, x).memory
    assert report.arguments == account.argument_size_in_bytes
    assert report.outputs == pytest.approx(
        account.output_size_in_bytes - account.alias_size_in_bytes, abs=64
    )
    assert report.temporaries == pytest.approx(account.temp_size_in_bytes, rel=0.25)


@pytest.mark.parametrize("of", [told_of_gathered, lambda: one_chip(jnp.sin, jnp.ones((8,)))])
def test_it_is_ten_lines_at_most_and_json(of: Callable[[], Estimate]) -> None:
    report = of()
    lines = str(report).splitlines()
    assert 3 <= len(lines) <= 10
    assert lines[0].startswith(f"{report.name}: ")
    assert report.on in lines[0]
    again = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert again["seconds"] == report.seconds
    assert again["memory"]["total"] == report.memory.total
    assert sum(one["seconds"] for one in again["operations"]) + again["exposed_seconds"] == (
        pytest.approx(report.seconds)
    )


def test_lowered_and_compiled_programs_are_estimated_too() -> None:
    side = shape((512, 512), jnp.float32)
    lowered = jax.jit(product).lower(side, side)
    of_function = one_chip(product, side, side)
    assert one_chip(lowered).flops == of_function.flops
    assert one_chip(lowered.compile()).flops == of_function.flops


def test_a_mesh_in_words_shards_what_it_is_reported_of() -> None:
    x: Any = partial(shape, dtype=jnp.bfloat16)
    report = estimate(
        product,
        x((1024, 2048), sharding=P("X", "Y")),
        x((2048, 8192), sharding=P(None, "Y")),
        on="v5litepod-8",
        mesh="X=2,Y=4",
        compiler="cpu",
    )
    assert report.mesh == {"X": 2, "Y": 4}
    assert [(one.kind, one.axes) for one in report.communication] == [("all-gather", ("Y",))]


# Refusals ----------------------------------------------------------------------------------------


def wrong(x: jax.Array) -> jax.Array:
    return x @ jnp.ones((3, 3))


REFUSALS: dict[str, tuple[Callable[[], Estimate], str]] = {
    "unknown slice": (lambda: estimate(jnp.sin, 1.0, on="v9-8"), "v9-8"),
    "no number of slices": (lambda: estimate(jnp.sin, 1.0, on="0xv6e-8"), "1 or more"),
    "a mesh that the slice has no room for": (
        lambda: estimate(jnp.sin, resize_mesh((8, 8), P("X")), on="v5litepod-4", compiler="cpu"),
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
        lambda: one_chip(wrong, shape((4, 4), jnp.float32)),
        "wrong does not trace: TypeError",
    ),
    "no function": (lambda: one_chip(3, shape((4,), jnp.float32)), "3 is not a function"),
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
def test_a_refusal_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.inspect.compiling.programs.has_tpu_compiler", lambda: False)
    call, says = REFUSALS[name]
    with pytest.raises((UserError, UnknownName)) as refusal:
        call()
    message = str(refusal.value)
    assert says in message
    assert "\n" not in message
    assert "Traceback" not in message


def test_a_function_that_does_not_trace_is_reported_with_its_own_line() -> None:
    with pytest.raises(UserError, match=r"at .*test_estimate\.py:\d+$"):
        one_chip(wrong, shape((4, 4), jnp.float32))


# Comparisons -------------------------------------------------------------------------------------


def data_parallel(devices: int) -> tuple[Any, ...]:
    """Rows of x over all devices, w on every one of them."""
    mesh = AbstractMesh((devices,), ("X",), (AxisType.Auto,))
    x = shape((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P("X")))
    return x, shape((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P()))


def contracted(devices: int) -> tuple[Any, ...]:
    """What is summed over lies on all devices: the terms are summed over the network."""
    mesh = AbstractMesh((devices,), ("X",), (AxisType.Auto,))
    x = shape((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "X")))
    return x, shape((4096, 4096), jnp.bfloat16, sharding=NamedSharding(mesh, P("X")))


BOTH = {"data": data_parallel, "contracted": contracted}


def test_variants_made_for_a_number_of_devices_are_ordered_by_time() -> None:
    report = compare(product, BOTH, ["v5litepod-4", "v5litepod-8"], compiler="cpu")
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
    report = compare(product, BOTH, ["v5litepod-4", "v5litepod-8"], compiler="cpu")
    tpu_slice = slice_of("v5litepod-8")
    public = [offer for offer in zone_offers(tpu_slice) if offer.public]
    listed = [price(tpu_slice, offer.zone, "spot") for offer in public]
    rate = min(one.per_chip_hour for one in listed if one is not None) * 8 / 3600
    by_name = {(choice.variant, choice.on): choice for choice in report.choices}
    one = by_name["data", "v5litepod-8"]
    assert one.estimate is not None
    assert one.dollars is not None
    assert one.dollars == pytest.approx(rate * one.estimate.seconds)
    priced = [choice.dollars for choice in report.choices if choice.dollars is not None]
    assert report.cheapest is not None
    assert report.cheapest.dollars == min(priced)
    dearer = compare(product, BOTH, "v5litepod-8", tier="on-demand", compiler="cpu")
    assert dearer.best is not None
    assert dearer.best.dollars is not None
    assert dearer.best.dollars > one.dollars
    assert "on-demand" in str(dearer)


def test_prices_are_those_of_the_zones_that_the_user_may_use() -> None:
    tpu_slice = slice_of("v5litepod-8")
    mine = ("us-west4-b", "europe-west4-a", "us-central2-b")
    report = compare(product, BOTH, ["v5litepod-8"], compiler="cpu", zones=mine)
    rates = [price(tpu_slice, zone, "spot") for zone in mine[:2]]
    lowest = min(rate.per_chip_hour for rate in rates if rate is not None)
    best = report.best
    assert best is not None
    assert best.estimate is not None
    assert best.zone in mine
    assert best.dollars == pytest.approx(lowest * 8 / 3600 * best.estimate.seconds)
    assert best.zone in str(report).splitlines()[1]
    assert report.to_dict()["choices"][0]["zone"] == best.zone
    nowhere = compare(product, BOTH, ["v5litepod-8"], compiler="cpu", zones=("us-central2-b",))
    assert nowhere.best is not None
    assert (nowhere.best.dollars, nowhere.best.zone) == (None, None)


def test_what_does_not_fit_comes_behind_what_does_and_what_does_not_go_last() -> None:
    def large(devices: int) -> tuple[Any, ...]:
        del devices
        return (shape((65536, 65536), jnp.bfloat16),) * 2

    def fails(*_: jax.Array) -> jax.Array:
        raise ValueError("this layout has none")

    small = (shape((4096, 4096), jnp.float32),) * 2
    report = compare(
        jnp.add,
        {
            "broken": ProgramVariant("broken", small, function=fails),
            "large": large,
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
    assert "broken on v5litepod-1: fails does not trace" in str(report)


def test_where_nothing_fits_there_is_no_best() -> None:
    large = (shape((65536, 65536), jnp.bfloat16),) * 2
    report = compare(jnp.add, {"large": large}, "v5litepod-1", compiler="cpu")
    assert report.best is None
    assert report.cheapest is None


def test_a_variant_that_fits_one_slice_alone_is_reported_so() -> None:
    report = compare(
        product,
        [ProgramVariant("four", data_parallel(4))],
        ["v5litepod-8", "v5litepod-4"],
        compiler="cpu",
    )
    assert [choice.on for choice in report.choices] == ["v5litepod-4", "v5litepod-8"]
    assert "has 4 devices and v5litepod-8 has 8" in report.choices[1].reason


@pytest.mark.parametrize(
    ("layouts", "on", "tier", "says"),
    [
        ({}, ["v5litepod-4"], "spot", "nothing to compare"),
        (BOTH, [], "spot", "nothing to compare"),
        (BOTH, ["v9-8"], "spot", "v9-8"),
        (BOTH, ["v5litepod-4"], "gratis", "gratis"),
    ],
)
def test_a_comparison_that_makes_no_sense_is_refused(
    layouts: dict[str, Any], on: list[str], tier: str, says: str
) -> None:
    with pytest.raises((UserError, UnknownName), match=says) as refusal:
        compare(product, layouts, on, tier=tier)
    assert "\n" not in str(refusal.value)
