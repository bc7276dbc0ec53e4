"""Regression tests of programs with formerly wrong reports, and of settings that broke the
compiler.
"""

# mypy: allow-untyped-calls

import re
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
    Estimate,
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


def matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return a @ b


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_answer_to_an_interrupted_request_is_discarded() -> None:
    def many_permutes(x: Any) -> Any:
        for _ in range(60):
            x = lax.ppermute(x, "Y", [(i, (i + 1) % 4) for i in range(4)]) * 2
        return x

    spec = P("X", "Y")
    mapped = jax.shard_map(many_permutes, mesh=MESH, in_specs=spec, out_specs=spec)
    expected_sentence = communication(matmul, A, B).sentence
    previous_handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        original_send = workers.Worker._send

        def interrupted_send(self: Any, request: Any, code: bytes) -> Any:
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            return original_send(self, request, code)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workers.Worker, "_send", interrupted_send)
            with pytest.raises(KeyboardInterrupt):
                communication(mapped, A)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)
    assert communication(matmul, A, B).sentence == expected_sentence


def test_a_collective_in_a_loops_condition_is_reported() -> None:
    def doubled(x: jax.Array) -> Any:
        return lax.while_loop(lambda c: jnp.sum(c) < 5, lambda c: c * 2, x)

    report = communication(doubled, A)
    assert {(collective.kind, collective.at_least) for collective in report.collectives} == {
        ("all-reduce", True)
    }
    with pytest.raises(UnexpectedCommunication, match="is forbidden"):
        expect_communication(doubled, A, forbid="all")
    # The number of iterations is unknown, so no limit can be checked.
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
    (collective,) = communication(
        mapped, shape(16, 4096, spec=P(None, "Y"), dtype=dtype)
    ).collectives
    assert (collective.dtype, collective.sent) == (jnp.dtype(dtype).name, 3 * 16 * 1024 * bits // 8)


@pytest.mark.parametrize("mesh", ["X=2,Y=2", "X=4,Y=4", "P=2,Q=4", {"X": 4, "Y": 2}])
def test_a_mesh_that_differs_from_the_arguments_is_rejected(mesh: Any) -> None:
    for fn, args in ((matmul, (A, B)), (jax.jit(matmul).lower(A, B), ())):
        with pytest.raises(UserError, match=r"mesh=.* but .* on X=2,Y=4"):
            communication(fn, *args, mesh=mesh)


def test_an_axis_of_another_mesh_of_the_same_devices_is_named() -> None:
    other_mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("p", "q"))

    def two_meshes(x: jax.Array) -> Any:
        def summed(x: jax.Array) -> Any:
            return lax.psum(x, "p")

        mapped = jax.shard_map(summed, mesh=other_mesh, in_specs=P("p"), out_specs=P())
        return mapped(x + 1)

    results = communication(two_meshes, shape(64, 8)).collectives
    assert {collective.axes for collective in results if collective.kind == "all-reduce"} == {
        ("p",)
    }


def test_a_branch_is_reported_to_send_at_most() -> None:
    def conditional(x: jax.Array, condition: jax.Array) -> Any:
        return lax.cond(condition, lambda x: jnp.sum(x, 0), lambda x: x[0], x)

    assert " sends at most " in communication(conditional, A, shape(dtype=jnp.bool_)).sentence


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
def test_copies_and_loop_iterations_take_time(
    fn: Callable[..., Any], args: Any, at_least: float
) -> None:
    assert at_least < estimate(fn, *args, on="v5litepod-1").seconds < 100 * at_least


def test_random_numbers_are_cheap_on_a_tpu() -> None:
    def dropout(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x, 0)

    x = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16)
    report = estimate(dropout, jax.random.key(0), x, on="v5litepod-1")
    assert report.seconds < 1e-3
    assert report.memory.temporaries < 2**20


@pytest.mark.parametrize(
    ("dtype", "result", "on", "speed"),
    [
        (jnp.int8, jnp.int32, "v5litepod-1", 2),
        (jnp.uint8, jnp.int32, "v6e-1", 2),
        (jnp.float8_e4m3fn, jnp.bfloat16, "v5litepod-1", 1),
        (jnp.float8_e5m2, jnp.float32, "v6e-1", 1),
        (jnp.float8_e4m3fn, jnp.float32, "H100", 2),
        (jnp.int4, jnp.int32, "A100", 2),
        (jnp.bfloat16, jnp.float32, "H200", 1),
    ],
)
def test_a_matmul_runs_at_the_rate_of_its_operands_whatever_its_result(
    dtype: Any, result: Any, on: str, speed: float
) -> None:
    def estimate_of(dtype: Any, result: Any) -> Estimate:
        def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
            return lax.dot(a, b, preferred_element_type=result)

        square = jax.ShapeDtypeStruct((8192, 8192), dtype)
        return estimate(multiply, square, square, on=on)

    report = estimate_of(dtype, result)
    assert 0.7 < report.mfu < 1
    (share,) = re.findall(r"matmul .* (\d+) % of peak", str(report))
    assert 70 < int(share) < 100
    bfloat16 = estimate_of(jnp.bfloat16, jnp.bfloat16)
    assert bfloat16.seconds / report.seconds == pytest.approx(speed, rel=0.06)


def test_recomputation_does_not_count_as_model_flops() -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32))

    args = [jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)] * 2
    without_checkpoint = estimate(jax.grad(loss, argnums=1), *args, on="v5litepod-1")
    with_checkpoint = estimate(jax.grad(jax.checkpoint(loss), argnums=1), *args, on="v5litepod-1")
    assert with_checkpoint.model_flops == pytest.approx(without_checkpoint.model_flops)


def test_settings_for_the_users_jax_do_not_reach_the_compilers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers.stop_workers()
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    assert communication(matmul, A, B).collectives
    workers.stop_workers()


def test_a_killed_compiler_process_is_replaced() -> None:
    communication(matmul, A, B)
    # Hold the process, because a later request for the worker gets its replacement, which still
    # runs.
    worker_process = workers.cpu_worker(8)._process
    worker_process.kill()
    worker_process.wait()
    assert communication(matmul, A, B).collectives


def test_invalid_variants_are_reported() -> None:
    variant = ProgramVariant("one", (A, B))
    with pytest.raises(UserError, match="two variants have one name"):
        compare(matmul, [variant, variant], on=["v5litepod-8"])
    with pytest.raises(UserError, match="is no ProgramVariant"):
        compare(matmul, [1, 2], on=["v5litepod-8"])  # type: ignore[list-item]

    def broken(devices: int) -> Any:
        raise ValueError(f"{devices} is odd")

    report = compare(matmul, {"broken": broken, "one": variant}, on=["v5litepod-8"])
    assert "ValueError: 8 is odd" in str(report)
    assert report.best is not None
