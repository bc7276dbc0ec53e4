"""The cost rule agrees with the TPU compiler's schedules of rings and of plain `jit`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
import pytest

from drumline.chips import chip
from drumline.chips.catalogue import TPUS
from drumline.parallel.einsum.costs import (
    CostMovement,
    ProjectionPlan,
    RingCost,
    choose_implementation,
    ring_seconds,
    xla_seconds,
)
from drumline.parallel.target import tpu_of

RING = 4


class RingRatio(NamedTuple):
    """The cost of a ring relative to `jit`, for rows × inner × columns in bfloat16.

    The first ratio is the forward pass, the second includes gradients. Sums are sent in bfloat16.
    The figures are those of docs/overlap.md, by the reading that favours the ring less.
    """

    kind: str
    movement: CostMovement
    dims: tuple[int, int, int]
    forward: float
    step: float


RATIOS = [
    RingRatio("TPU v5", "gather contraction", (512, 2048, 8192), 1.08, 1.22),
    RingRatio("TPU v5", "gather rows", (512, 2048, 8192), 1.15, 1.61),
    RingRatio("TPU v5", "scatter", (512, 2048, 8192), 1.28, 1.18),
    RingRatio("TPU v5", "allreduce", (512, 2048, 8192), 1.43, 1.10),
    RingRatio("TPU v5", "gather rows", (8192, 4096, 14336), 0.82, 0.86),
    RingRatio("TPU v5", "gather rows", (8192, 4096, 6144), 0.99, 0.88),
    RingRatio("TPU v5", "scatter", (8192, 14336, 4096), 0.80, 0.86),
    RingRatio("TPU v5", "scatter", (8192, 4096, 4096), 1.01, 0.97),
    RingRatio("TPU v5", "gather rows", (8192, 8192, 28672), 0.80, 0.95),
    RingRatio("TPU v5", "gather rows", (8192, 8192, 10240), 0.88, 0.80),
    RingRatio("TPU v5", "scatter", (8192, 28672, 8192), 0.83, 0.93),
    RingRatio("TPU v5", "gather contraction", (8192, 4096, 14336), 0.97, 0.88),
    RingRatio("TPU v5", "allreduce", (8192, 14336, 4096), 1.07, 0.87),
    RingRatio("TPU v5 lite", "gather rows", (8192, 4096, 14336), 0.73, 1.05),
    RingRatio("TPU v5 lite", "gather rows", (8192, 4096, 6144), 0.84, 0.80),
    RingRatio("TPU v5 lite", "scatter", (8192, 14336, 4096), 0.80, 1.01),
    RingRatio("TPU v5 lite", "scatter", (8192, 4096, 4096), 1.02, 1.02),
    RingRatio("TPU v5 lite", "scatter", (512, 2048, 8192), 1.31, 1.31),
    RingRatio("TPU v5 lite", "allreduce", (8192, 14336, 4096), 1.08, 0.91),
    RingRatio("TPU v4", "gather rows", (8192, 4096, 14336), 0.92, 0.89),
    RingRatio("TPU v4", "scatter", (8192, 14336, 4096), 0.94, 0.91),
    RingRatio("TPU v6 lite", "gather rows", (8192, 4096, 14336), 0.95, 1.054),
    RingRatio("TPU v6 lite", "scatter", (8192, 14336, 4096), 0.96, 0.94),
]


def _is_chosen(ratio_row: RingRatio) -> bool:
    rows, inner, columns = ratio_row.dims
    moved_size = inner if ratio_row.movement.startswith("gather") else columns
    flops = 2.0 * rows * inner * columns / RING
    chip = tpu_of(ratio_row.kind)
    shard = rows * moved_size / RING
    cost = RingCost(ratio_row.movement, RING, flops, shard, inner * columns / RING, 2)
    return ring_seconds(cost, 2, chip).ratio(xla_seconds(cost, chip)) <= 1


@pytest.mark.parametrize(
    "ratio_row",
    RATIOS,
    ids=lambda ratio_row: f"{ratio_row.kind}, {ratio_row.movement} {ratio_row.dims}",
)
def test_a_ring_is_chosen_if_it_clearly_pays_and_never_if_it_is_slower(
    ratio_row: RingRatio,
) -> None:
    worst = max(ratio_row.forward, ratio_row.step)
    if _is_chosen(ratio_row):
        assert worst <= 1.05
    else:
        assert worst > 0.95


def test_aliases_of_a_device_kind_are_equal() -> None:
    assert tpu_of("TPU v5p") == tpu_of("TPU v5") != tpu_of("TPU v5e") == tpu_of("TPU v5 lite")
    assert tpu_of("TPU v99") == tpu_of("TPU v5e")


def test_the_tpus_match_the_catalogue() -> None:
    for kind, (name, devices) in TPUS.items():
        catalogue_chip, tpu = chip(name), tpu_of(kind)
        assert (tpu.peak_flops, tpu.memory_bandwidth) == (
            catalogue_chip.peak_bf16_flops / devices,
            catalogue_chip.hbm_bandwidth / devices,
        ), kind
        assert tpu.link_bandwidth == catalogue_chip.link_bandwidth, kind


def _gather_rows(rows: int, inner: int, columns: int) -> RingCost:
    flops = 2.0 * rows * inner * columns / RING
    return RingCost("gather rows", RING, flops, rows * inner / RING, inner * columns / RING, 2)


BLOCK, SMALL = _gather_rows(8192, 4096, 14336), _gather_rows(512, 2048, 8192)


def test_a_model_uses_rings_only_where_they_clearly_pay() -> None:
    v5p = tpu_of("TPU v5p")
    bfloat16 = jnp.dtype(jnp.bfloat16)
    assert choose_implementation(BLOCK, "auto", None, bfloat16, v5p) == ProjectionPlan(
        "ring", bfloat16
    )
    assert choose_implementation(SMALL, "auto", None, bfloat16, v5p) == ProjectionPlan(
        "xla", bfloat16
    )
    assert choose_implementation(SMALL, "ring", None, bfloat16, v5p).implementation == "ring"
    assert choose_implementation(BLOCK, "xla", None, bfloat16, v5p).implementation == "xla"
    v6e = tpu_of("TPU v6e")
    assert choose_implementation(BLOCK, "auto", None, bfloat16, v6e) == ProjectionPlan(
        "xla", bfloat16
    )


def test_sums_are_sent_in_the_type_of_the_result_on_a_tpu_unless_another_is_requested() -> None:
    bfloat16, v5e = jnp.dtype(jnp.bfloat16), tpu_of("TPU v5e")
    assert choose_implementation(BLOCK, "ring", None, bfloat16, v5e).wire_dtype == bfloat16
    assert choose_implementation(BLOCK, "ring", "float32", bfloat16, v5e).wire_dtype == jnp.float32
    many = replace(BLOCK, devices=64)
    assert choose_implementation(many, "ring", None, bfloat16, v5e).wire_dtype is None, (
        "too many roundings"
    )
    assert choose_implementation(BLOCK, "ring", None, bfloat16, None).wire_dtype is None, (
        "not a TPU"
    )
