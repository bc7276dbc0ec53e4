"""`einsum(implementation=…)` overrides the choice, or says why it cannot."""

# mypy: allow-untyped-calls

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel import einsum, explain_einsum
from drumline.parallel.target import trace_for

MESH = jax.make_mesh((2, 4), ("X", "Y"), axis_types=(AxisType.Explicit,) * 2)
GATHER: tuple[str, P, P, P] = ("bd,df->bf", P("Y"), P(None, "Y"), P(None, "Y"))
SCATTER: tuple[str, P, P, P] = ("bf,fd->bd", P(None, "Y"), P("Y"), P("Y"))


def operands(case: tuple[str, P, P, P], *sizes: int) -> Any:
    """Return x, w and the sharding of the result."""
    rows, inner, columns = sizes
    rng = np.random.default_rng(0)
    arrays = (rng.normal(size=(rows, inner)), rng.normal(size=(inner, columns)))
    _, x_spec, w_spec, out = case
    x, w = (
        jax.device_put(array.astype(np.float32), NamedSharding(MESH, spec))
        for array, spec in zip(arrays, (x_spec, w_spec), strict=True)
    )
    return x, w, out


@pytest.mark.parametrize("case", [GATHER, SCATTER], ids=["gather", "scatter"])
@pytest.mark.parametrize("implementation", ["ring", "xla"])
def test_an_implementation_that_is_slower_can_be_requested(
    case: tuple[str, P, P, P], implementation: Any
) -> None:
    """The matmul is so small that a ring never pays on a TPU."""
    with jax.set_mesh(MESH), trace_for("tpu", "TPU v5p"):
        x, w, out = operands(case, 16, 16, 16)
        automatic = explain_einsum(case[0], x, w, out_sharding=out)
        assert automatic.choice == "jnp.einsum"
        chosen = explain_einsum(case[0], x, w, out_sharding=out, implementation=implementation)
        assert (chosen.choice == "jnp.einsum") == (implementation == "xla")

        def run(x: jax.Array, w: jax.Array) -> jax.Array:
            return einsum(case[0], x, w, out_sharding=out, implementation=implementation)

        lowered = jax.jit(run).lower(x, w)
        assert ("collective_permute" in lowered.as_text()) == (implementation == "ring")
        result = jax.jit(run)(x, w)
    np.testing.assert_allclose(result, np.asarray(x) @ np.asarray(w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", [GATHER, SCATTER], ids=["gather", "scatter"])
def test_pallas_is_a_kernel_that_contains_the_ring(case: tuple[str, P, P, P]) -> None:
    spec, x_spec, w_spec, out = case
    chip = AbstractDevice("TPU v5 lite", 1, "tpu")
    mesh = AbstractMesh((2, 4), ("X", "Y"), (AxisType.Explicit,) * 2, abstract_device=chip)
    x, w = (
        jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=NamedSharding(mesh, p))
        for p in (x_spec, w_spec)
    )
    with jax.sharding.use_abstract_mesh(mesh):
        run = jax.jit(partial(einsum, spec, out_sharding=out, implementation="pallas"))
        lowered = run.trace(x, w).lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in lowered
    assert "collective_permute" not in lowered


def test_shardings_without_a_ring_are_an_error_if_one_is_requested() -> None:
    with jax.set_mesh(MESH):
        x, w, out = operands(("", P("X", "Y"), P("X", "Y"), P("X", "Y")), 16, 16, 16)
        with pytest.raises(ValueError, match=r"no ring fits 'bd,df->bf': .*; change the shardings"):
            einsum("bd,df->bf", x, w, out_sharding=out, implementation="ring")
        with pytest.raises(ValueError, match="implementation must be"):
            einsum("bd,df->bf", x, w, out_sharding=out, implementation="rings")  # type: ignore[call-overload]


def test_pallas_names_the_movements_that_it_has() -> None:
    spec, out = "bd,df->bf", P(None, "Y")
    with jax.set_mesh(MESH):
        x, w, _ = operands((spec, P(None, "Y"), P(None, "Y"), out), 16, 16, 16)
        with pytest.raises(ValueError, match="'pallas' gathers or scatters the rows of a matrix"):
            einsum(spec, x, w, out_sharding=out, implementation="pallas")
