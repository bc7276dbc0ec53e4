"""The same program, lowered for other devices without running it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from drumline.parallel.experts.matmul import expert_matmul
from drumline.parallel.grouped import matmul as grouped_matmul

from .tokens import P, abstract_mesh


# The count covers both directions, with gradients and gates. A TPU sends the first round before the
# loop and returns the last one after it.
@pytest.mark.parametrize(("platform", "count"), [("tpu", 14), ("cuda", 7)])
def test_ragged_all_to_all_is_used_where_it_exists(platform: str, count: int) -> None:
    text = _lowered(platform)
    assert text.count("@ragged_all_to_all") == count
    assert "stablehlo.all_to_all" not in text
    assert "ragged_dot" not in text
    # x @ w, dy @ wᵀ, xᵀ dy
    assert text.count("@tpu_custom_call") == (3 if platform == "tpu" else 0)


def test_hopper_kernels_lower_inside_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_matmul, "_on_hopper", lambda: True)
    text = _lowered("cuda")
    assert text.count("custom_call @mosaic_gpu") == 3  # x @ w, dy @ wᵀ, xᵀ dy
    assert text.count("@ragged_all_to_all") == 7


def test_all_to_all_is_used_on_a_cpu() -> None:
    text = _lowered("cpu")
    assert text.count("stablehlo.all_to_all") == 7
    assert "ragged" not in text


def _lowered(platform: str) -> str:
    """Return value and gradients for a mesh of 16 × 8 devices, as StableHLO."""
    mesh = abstract_mesh((16, 8), "XY", platform)
    function = jax.shard_map(
        partial(expert_matmul, axis_name="X", gather_axis_name="Y", exchange="alltoall"),
        mesh=mesh,
        in_specs=(P("X", "Y"), P("X", None, "Y"), P("X"), P("X")),
        out_specs=P("X", "Y"),
    )

    def run(a: Any, w: Any, b: Any, gates: Any, dout: Any) -> Any:
        out, vjp_function = jax.vjp(lambda a, w, g: function(a, w, b, g), a, w, gates)
        return out, vjp_function(dout)

    def shape_struct(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]

    operands = (
        shape_struct(4096, 512),
        shape_struct(64, 512, 1024),
        shape_struct(4096, 2, dtype=jnp.int32),
        shape_struct(4096, 2, dtype=jnp.float32),
        shape_struct(4096, 1024),
    )
    lowered = jax.jit(run).trace(*operands).lower(lowering_platforms=(platform,))
    return str(lowered.as_text())
