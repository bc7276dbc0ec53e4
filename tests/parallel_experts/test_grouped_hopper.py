"""The Hopper path as far as a machine without one can see: padding is right, kernels lower."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from drumline.parallel import grouped_hopper, grouped_matmul
from drumline.parallel.experts import expert_matmul
from drumline.parallel.grouped_rows import group_rows

from .tokens import assert_true, assign, draw, with_gradients


def test_padded_groups_hold_every_pair_once_and_zeros_between() -> None:
    keys = np.array([2, 0, 2, 3, 2, 0], np.int32)  # 3 stands for none
    groups = group_rows(jnp.asarray(keys), 3, 4)
    np.testing.assert_array_equal(groups.sizes, [4, 0, 4])
    rows = jnp.arange(1.0, 7.0)[:, None]
    spread = groups.spread(rows)
    np.testing.assert_array_equal(spread[:8, 0], [2, 6, 0, 0, 1, 3, 5, 0])
    np.testing.assert_array_equal(groups.collect(spread), rows)


def test_results_do_not_change_when_groups_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drumline.parallel.experts.row_alignment", lambda _: 32)
    case, assignment = draw(8, 2), assign("adversarial", 8, 2)
    assignment[3, 1] = -1
    assert_true(with_gradients(expert_matmul)(case, assignment), case, assignment)


@pytest.mark.parametrize(("d", "f"), [(256, 384), (384, 512)])
def test_value_and_gradients_lower_for_a_hopper_gpu(
    monkeypatch: pytest.MonkeyPatch, d: int, f: int
) -> None:
    monkeypatch.setattr(grouped_matmul, "_on_hopper", lambda: True)

    def run(a: Any, w: Any, b: Any, gates: Any, dout: Any) -> Any:
        out, pull = jax.vjp(lambda a, w, g: expert_matmul(a, w, b, g), a, w, gates)
        return out, pull(dout)

    def of(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

    half = jnp.bfloat16
    operands = (
        of((512, d), half),
        of((8, d, f), half),
        of((512, 2), jnp.int32),
        of((512, 2), jnp.float32),
        of((512, f), half),
    )
    text = jax.jit(run).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3  # x @ w, dy @ wᵀ, xᵀ dy


def test_shapes_the_tiles_do_not_fit_are_left_to_the_loops() -> None:
    half = jnp.dtype(jnp.bfloat16)
    assert grouped_hopper.takes(half, 2048, 1408)
    assert not grouped_hopper.takes(half, 128, 384)
    assert not grouped_hopper.takes(half, 256, 100)
    assert not grouped_hopper.takes(jnp.dtype(jnp.float32), 256, 256)
