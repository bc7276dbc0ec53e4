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


def test_each_platform_has_its_own_exchange() -> None:
    program = _traced()
    # The count covers both directions, with gradients and gates. A TPU sends the first round before
    # the loop and returns the last one after it.
    for platform, count in (("tpu", 14), ("cuda", 7)):
        text = _lowered(program, platform)
        assert text.count("@ragged_all_to_all") == count
        assert "stablehlo.all_to_all" not in text
        assert "ragged_dot" not in text
        # x @ w, dy @ wᵀ, xᵀ dy
        assert text.count("@tpu_custom_call") == (3 if platform == "tpu" else 0)
    text = _lowered(program, "cpu")
    assert text.count("stablehlo.all_to_all") == 7
    assert "ragged" not in text


def test_hopper_kernels_lower_inside_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_matmul, "_on_hopper", lambda: True)
    text = _lowered(_traced(), "cuda")
    assert text.count("custom_call @mosaic_gpu") == 3  # x @ w, dy @ wᵀ, xᵀ dy
    assert text.count("@ragged_all_to_all") == 7


def _lowered(program: jax.stages.Traced, platform: str) -> str:
    return str(program.lower(lowering_platforms=(platform,)).as_text())


def _traced() -> jax.stages.Traced:
    """Return value and gradients, traced for all platforms and a mesh of 16 × 8 devices."""
    function = jax.shard_map(
        partial(expert_matmul, axis_name="X", gather_axis_name="Y", exchange="alltoall"),
        mesh=abstract_mesh((16, 8), "XY"),
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
    return jax.jit(run).trace(*operands)
