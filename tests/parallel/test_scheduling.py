"""The compiler options of programs with rings, and their effect."""

# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.inspect.compiling.workers import TPU_PYTHON, has_tpu_compiler
from drumline.inspect.estimate import estimate
from drumline.parallel import allgather_matmul, overlap_options
from drumline.parallel.target import trace_for

EARLY = "xla_lhs_output_fusion_latency_multiplier"


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5p", "TPU v5", "TPU v6 lite"])
def test_the_options_are_set_for_chips_that_start_permutes_late(kind: str) -> None:
    with trace_for("tpu", kind):
        assert overlap_options().keys() == {EARLY}


def test_the_options_are_empty_elsewhere() -> None:
    assert overlap_options() == {}
    with trace_for("tpu", "TPU v5 lite"):
        assert overlap_options() == {}


def test_the_options_are_empty_for_a_compiler_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with trace_for("tpu", "TPU v5p"):
        assert overlap_options() == {}, "the CPU's compiler rejects the option"


@pytest.mark.skipif(
    not has_tpu_compiler(), reason=f"needs the TPU's compiler: libtpu, or {TPU_PYTHON}"
)
def test_early_permutes_shorten_the_waits() -> None:
    mesh = AbstractMesh((2, 4), ("X", "Y"))
    x, w = (
        jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for dims, spec in (((16384, 4096), P(("X", "Y"), None)), ((4096, 6144), P(None, "Y")))
    )
    ring = jax.shard_map(
        partial(allgather_matmul, axis_name="Y", gathered="rows"),
        mesh=mesh,
        in_specs=(x.sharding.spec, w.sharding.spec),
        out_specs=P("X", "Y"),
    )
    with trace_for("tpu", "TPU v5p"):
        options = overlap_options()

    def exposed(**compiler_options: float) -> float:
        step = jax.jit(ring, compiler_options=compiler_options)
        return estimate(step, x, w, on="v5p-16", torus_dims="rings", compiler="tpu").exposed

    assert exposed(**options) < 0.85 * exposed()
