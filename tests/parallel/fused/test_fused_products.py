"""The fused kernels agree with exact matmuls on rings of every size, without races."""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.parallel.fused import ring as fused_ring
from drumline.parallel.fused.plans import RESERVED_VMEM, Blocks, Operands, vmem_bytes_of
from drumline.parallel.fused.ring import Slots
from tests.cases import rare, sampled
from tests.parallel.fused.emulated import (
    GATHER,
    SCATTER,
    Fused,
    Mode,
    assert_close,
    check_races,
    interpreter,
    operands,
    ring_mesh,
    sharded,
    with_gradients,
)

BF16, F32 = jnp.bfloat16, jnp.float32
FUNCTIONS = {"gather": GATHER, "scatter": SCATTER}
DIRECTIONS, MODES = ("both", "one"), ("on_wait", "eager")
GRID = [
    *product(FUNCTIONS, range(1, 9), DIRECTIONS, [F32], MODES),
    # The type affects only the arithmetic, so one number of devices is enough.
    *product(FUNCTIONS, [3], DIRECTIONS, [BF16], MODES),
]
WITH_GRADIENTS = [
    ("gather", 3, "one", BF16, "eager"),
    ("scatter", 3, "both", F32, "on_wait"),
]
FORWARD = [
    ("scatter", 5, "both", F32, "eager"),
    ("gather", 7, "one", F32, "on_wait"),
    ("gather", 8, "both", F32, "on_wait"),
]


@pytest.fixture(autouse=True)
def fresh_emulator() -> Iterator[None]:
    """Reset the emulator, because an exception leaves state that affects the next test."""
    yield
    pltpu.reset_tpu_interpret_mode_state()


@pytest.mark.parametrize(
    ("function", "devices", "direction", "dtype", "mode"), sampled(GRID, WITH_GRADIENTS)
)
def test_matmuls_and_their_gradients(
    function: str, devices: int, direction: str, dtype: Any, mode: Mode
) -> None:
    fused = FUNCTIONS[function]
    x, w, g = operands(fused, devices, dtype)
    run = sharded(fused, ring_mesh(devices), direction=direction, interpret=interpreter(mode))
    out, dx, dw = with_gradients(run)(x, w, g)
    check_races()
    exact_x, exact_w, exact_g = (np.asarray(operand, np.float64) for operand in (x, w, g))
    assert out.dtype == dx.dtype == dw.dtype == dtype
    assert_close(out, exact_x @ exact_w)
    assert_close(dx, exact_g @ exact_w.T)
    assert_close(dw, exact_x.T @ exact_g)


@pytest.mark.every_case
@pytest.mark.parametrize(("function", "devices", "direction", "dtype", "mode"), FORWARD)
def test_matmuls_on_longer_rings(
    function: str, devices: int, direction: str, dtype: Any, mode: Mode
) -> None:
    fused = FUNCTIONS[function]
    x, w, _ = operands(fused, devices, dtype)
    options = {"direction": direction, "interpret": interpreter(mode)}
    out = sharded(fused, ring_mesh(devices), **options)(x, w)
    check_races()
    assert_close(out, np.asarray(x, np.float64) @ np.asarray(w, np.float64))


@pytest.mark.every_case
@pytest.mark.usefixtures("emulated_tpu")
@pytest.mark.parametrize("cores", [1, *rare(2)])  # Two cores take half a minute to emulate.
@pytest.mark.parametrize("function", ["gather", *rare("scatter")])
def test_matmuls_of_several_blocks(function: str, cores: int) -> None:
    fused = FUNCTIONS[function]
    x, w, g = operands(fused, 2, F32)
    small_vmem = RESERVED_VMEM + (256 << 10)
    for rows in (x.shape[0] // 2, x.shape[0] // 4):
        full_blocks = Blocks(rows, w.shape[1], w.shape[0])
        assert vmem_bytes_of(full_blocks, Operands(4, 4, added=2)) > small_vmem - RESERVED_VMEM
    options = {"vmem_bytes": small_vmem, "cores": cores, "interpret": interpreter("on_wait", cores)}
    out, dx, dw = with_gradients(sharded(fused, ring_mesh(2), **options))(x, w, g)
    check_races()
    exact_x, exact_w, exact_g = (np.asarray(operand, np.float64) for operand in (x, w, g))
    assert_close(out, exact_x @ exact_w)
    assert_close(dx, exact_g @ exact_w.T)
    assert_close(dw, exact_x.T @ exact_g)


@pytest.mark.parametrize(("axis", "fused"), [("Y", SCATTER), *rare(("X", GATHER))])
def test_a_ring_over_either_axis_of_a_mesh(axis: str, fused: Fused) -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("X", "Y"))
    devices = mesh.shape[axis]
    copies = 6 // devices

    def specs_over_axis(spec: P) -> P:
        # Each device of the other axis has its own problem, in a leading dimension.
        other = "Y" if axis == "X" else "X"
        return P(other, *(axis if name == "Y" else None for name in spec))

    def local(x: jax.Array, w: jax.Array) -> jax.Array:
        return fused.function(x[0], w[0], axis_name=axis, interpret=interpreter("eager"))[None]

    x, w, _ = operands(fused, devices, F32)
    xs = np.stack([x * np.float32(1 + index) for index in range(copies)])
    ws = np.stack([w] * copies)
    run = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs_over_axis(fused.x), specs_over_axis(fused.w)),
        out_specs=specs_over_axis(fused.out),
        check_vma=False,
    )
    out = jax.jit(run)(xs, ws)
    check_races()
    assert_close(out, np.asarray(xs, np.float64) @ np.asarray(w, np.float64))


@pytest.mark.every_case
def test_a_ring_over_two_axes_in_another_order_than_the_mesh() -> None:
    mesh = Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("X", "Y"))
    axes = ("Y", "X")
    x, w, _ = operands(GATHER, 6, F32)
    run = jax.shard_map(
        partial(GATHER.function, axis_name=axes, interpret=interpreter("eager")),
        mesh=mesh,
        in_specs=(P(axes, None), P(None, axes)),
        out_specs=P(None, axes),
        check_vma=False,
    )
    out = jax.jit(run)(x, w)
    check_races()
    assert_close(out, np.asarray(x, np.float64) @ np.asarray(w, np.float64))


def test_sums_can_be_sent_in_bfloat16() -> None:
    x, w, _ = operands(SCATTER, 3, F32)
    options = {"wire_dtype": jnp.bfloat16, "interpret": interpreter("eager")}
    out = np.asarray(sharded(SCATTER, ring_mesh(3), **options)(x, w), np.float64)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64)
    error = np.max(np.abs(out - exact)) / np.max(np.abs(exact))
    assert 1e-5 < error < 2.0**-8


def test_slots_are_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ring, "SLOTS", 2)
    _run_one_direction_on_four_devices()


def test_a_chunk_sent_to_an_occupied_slot_is_a_race(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_ring, "SLOTS", 2)
    monkeypatch.setattr(Slots, "reuses_slots", False)
    with pytest.raises(
        RuntimeError, match="RACE DETECTED"
    ):  # JAX raises this error itself since 0.12
        _run_one_direction_on_four_devices()


def _run_one_direction_on_four_devices() -> None:
    x, w, _ = operands(GATHER, 4, F32)
    options = {"direction": "one", "interpret": interpreter("eager")}
    sharded(GATHER, ring_mesh(4), **options)(x, w).block_until_ready()
    check_races()
