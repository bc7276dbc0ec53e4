"""Programs that were once told wrongly, and settings that once broke the compiler's process."""

# mypy: allow-untyped-calls

import signal
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.errors import UserError
from drumline.inspect import (
    ProgramVariant,
    UnexpectedCommunication,
    communication,
    compare,
    estimate,
    expect_communication,
)
from drumline.inspect.compiling import workers

MESH = jax.make_mesh((2, 4), ("X", "Y"), (AxisType.Auto, AxisType.Auto))


def shape(*sizes: int, spec: P | None = None, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(MESH, spec or P()))


A, B = shape(256, 512, spec=P("X", "Y")), shape(512, 128, spec=P("Y", None))


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_answer_that_nobody_waited_for_is_not_the_next_programs() -> None:
    def hops(x: Any) -> Any:
        for _ in range(60):
            x = lax.ppermute(x, "Y", [(i, (i + 1) % 4) for i in range(4)]) * 2
        return x

    spec = P("X", "Y")
    mapped = jax.shard_map(hops, mesh=MESH, in_specs=spec, out_specs=spec)
    right = communication(product, A, B).sentence
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        ask = workers.Worker._send

        def slow(self: Any, request: Any, code: bytes) -> Any:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return ask(self, request, code)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers.Worker, "_send", slow)
            with pytest.raises(KeyboardInterrupt):
                communication(mapped, A)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert communication(product, A, B).sentence == right


def test_what_a_loop_asks_in_its_condition_is_sent_too() -> None:
    def doubled(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: jnp.sum(c) < 5, lambda c: c * 2, x)

    report = communication(doubled, A)
    assert {(one.kind, one.at_least) for one in report.collectives} == {("all-reduce", True)}
    with pytest.raises(UnexpectedCommunication, match="is forbidden"):
        expect_communication(doubled, A, forbid="all")
    # How often is not known, so that no limit is kept to.
    with pytest.raises(UnexpectedCommunication, match="only if its loop ends soon enough"):
        expect_communication(doubled, A, allow={"all-reduce": "100 MiB"})


@pytest.mark.parametrize(
    ("dtype", "bits"),
    [(jnp.float8_e4m3fn, 8), (jnp.float8_e5m2, 8), (jnp.float4_e2m1fn, 4), (jnp.int2, 2)],
)
def test_narrow_types_are_sent_as_they_are(dtype: Any, bits: int) -> None:
    def gather(x: jax.Array) -> Any:
        return lax.all_gather(x, "Y", axis=1, tiled=True)

    mapped = jax.shard_map(gather, mesh=MESH, in_specs=P(None, "Y"), out_specs=P(), check_vma=False)
    (one,) = communication(mapped, shape(16, 4096, spec=P(None, "Y"), dtype=dtype)).collectives
    assert (one.dtype, one.sent) == (jnp.dtype(dtype).name, 3 * 16 * 1024 * bits // 8)


@pytest.mark.parametrize("mesh", ["X=2,Y=2", "X=4,Y=4", "P=2,Q=4", {"X": 4, "Y": 2}])
def test_a_mesh_that_is_not_the_arguments_is_refused(mesh: Any) -> None:
    for fn, args in ((product, (A, B)), (jax.jit(product).lower(A, B), ())):
        with pytest.raises(UserError, match=r"mesh=.* but .* on X=2,Y=4"):
            communication(fn, *args, mesh=mesh)


def test_an_axis_of_another_mesh_of_the_same_devices_is_named() -> None:
    other = Mesh(np.array(jax.devices()).reshape(4, 2), ("p", "q"))

    def both(x: jax.Array) -> Any:
        def summed(x: jax.Array) -> Any:
            return lax.psum(x, "p")

        mapped = jax.shard_map(summed, mesh=other, in_specs=P("p"), out_specs=P())
        return mapped(x + 1)

    results = communication(both, shape(64, 8)).collectives
    assert {one.axes for one in results if one.kind == "all-reduce"} == {("p",)}


def test_a_branch_is_said_to_send_at_most() -> None:
    def maybe(x: jax.Array, condition: jax.Array) -> Any:
        return lax.cond(condition, lambda x: jnp.sum(x, 0), lambda x: x[0], x)

    assert " sends at most " in communication(maybe, A, shape(dtype=jnp.bool_)).sentence


@pytest.mark.parametrize(
    ("fn", "args", "at_least"),
    [
        (lambda a: a.T, (jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16),), 6e-5),
        (
            lambda a: lax.fori_loop(0, 100_000, lambda i, x: x + i, a),
            (jax.ShapeDtypeStruct((), jnp.float32),),
            1e-2,
        ),
    ],
    ids=["a transpose is a copy", "turns take time"],
)
def test_nothing_is_for_nothing(fn: Callable[..., Any], args: Any, at_least: float) -> None:
    assert at_least < estimate(fn, *args, on="v5litepod-1").seconds < 100 * at_least


def test_random_numbers_cost_what_tpus_take_for_them() -> None:
    def dropout(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)

    x = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16)
    report = estimate(dropout, jax.random.key(0), x, on="v5litepod-1")
    assert report.seconds < 1e-3
    assert report.memory.temporaries < 2**20


def test_eight_bits_are_held_against_their_own_peak() -> None:
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot(a, b, preferred_element_type=jnp.int32)

    square = jax.ShapeDtypeStruct((8192, 8192), jnp.int8)
    assert 0.8 < estimate(multiply, square, square, on="v5litepod-1").mfu < 1


def test_what_is_computed_once_is_not_computed_again() -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32))

    args = [jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)] * 2
    plain = estimate(jax.grad(loss, argnums=1), *args, on="v5litepod-1")
    again = estimate(jax.grad(jax.checkpoint(loss), argnums=1), *args, on="v5litepod-1")
    assert again.model_flops == pytest.approx(plain.model_flops)


def test_settings_for_the_users_jax_do_not_reach_the_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers.stop_workers()
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert communication(product, A, B).collectives
    workers.stop_workers()


def test_a_process_that_is_killed_is_replaced() -> None:
    communication(product, A, B)
    # Held, as whoever asks for it again once it is dead is given the next, which does not end.
    killed = workers.cpu_worker(8)._process
    killed.kill()
    killed.wait()
    assert communication(product, A, B).collectives


def test_variants_that_make_no_sense_are_reported() -> None:
    one = ProgramVariant("one", (A, B))
    with pytest.raises(UserError, match="two variants have one name"):
        compare(product, [one, one], on=["v5litepod-8"])
    with pytest.raises(UserError, match="is no ProgramVariant"):
        compare(product, [1, 2], on=["v5litepod-8"])  # type: ignore[list-item]

    def broken(devices: int) -> Any:
        raise ValueError(f"{devices} is odd")

    report = compare(product, {"broken": broken, "one": one}, on=["v5litepod-8"])
    assert "ValueError: 8 is odd" in str(report)
    assert report.best is not None
