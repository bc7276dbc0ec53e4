"""Einsums without a fitting ring are left to XLA, with a reason that the user can act on."""

# mypy: allow-untyped-calls

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from drumline.parallel.einsum.sharded import einsum, explain_einsum
from tests.cases import sampled
from tests.pairwise import pairwise

LENGTHS = {"b": 8, "s": 16, "d": 16, "f": 32, "h": 8, "k": 4, "e": 4, "o": 2, "p": 3}

LEFT_TO_XLA = {
    "two movements": (
        "bsd,df->bsf",
        (P("X", "Y"), P("X", "Y"), P("X", None, "Y")),
        "more than one dimension must move ('d' is unsharded in x and over 'X' in w; 's' is over "
        "'Y' in x and unsharded in the result); reshard all but one first",
    ),
    "a batched product": (
        "ebd,edf->ebf",
        (P("X", None, "Y"), P("X", "Y"), P("X")),
        "'e' is in both operands and the result, a batched product",
    ),
    "a sum within one operand": (
        "bsd,df->bf",
        (P(None, None, "Y"), P("Y"), P()),
        "'s' is summed over within one operand",
    ),
    "operands that disagree": (
        "bd,df->bf",
        (P(None, "X"), P("Y"), P()),
        "the operands disagree: 'd' is over 'X' in x and over 'Y' in w",
    ),
    "the same work on every device": (
        "bd,df->bf",
        (P("X", "Y"), P(), P("X")),
        "'d' is over 'Y' in x and unsharded in w, and nothing of the other operand is over 'Y': "
        "all its devices would compute the same matmul",
    ),
    "an all-to-all": (
        "bd,df->bf",
        (P("Y"), P(), P("X")),
        "'b' is over 'Y' in x and over 'X' in the result, which is not a gather",
    ),
    "nothing that divides": (
        "od,dp->op",
        (P(None, "Y"), P("Y"), P()),
        "neither the 2 rows nor the 3 columns of the result can be divided between the 4 devices "
        "of 'Y'",
    ),
    "a repeated letter": ("dd,df->df", (P(), P(), P()), "'dd,df->df' repeats a letter"),
    "no arrow": ("bd,df", (P(), P(), P()), "'bd,df' does not name the result after '->'"),
    "one operand": ("bd->b", (P(), P(), P()), "'bd->b' has 1 operands, not two"),
}


def _operands(spec: str, x: P, w: P) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    terms = spec.split("->")[0].split(",")

    def random_array(labels: str, sharding: P) -> jax.Array:
        values = rng.normal(size=[LENGTHS[n] for n in labels]).astype(np.float32)
        sharded: jax.Array = jax.device_put(values, sharding)
        return sharded

    return random_array(terms[0], x), random_array(terms[-1], w)


@pytest.mark.parametrize("name", LEFT_TO_XLA)
def test_the_reason_names_the_dimension_and_the_axis(name: str) -> None:
    spec, (x_spec, w_spec, out), reason = LEFT_TO_XLA[name]
    with jax.set_mesh(jax.make_mesh((2, 4), ("X", "Y"))):
        x, w = _operands(spec, x_spec, w_spec)
        explanation = explain_einsum(spec, x, w, out_sharding=out)
        assert explanation.choice == "jnp.einsum"
        assert explanation.reason.startswith(reason)
        assert explanation.bytes_per_axis == {}
        assert str(explanation) == f"jnp.einsum: {explanation.reason}"
        if name not in ("a repeated letter", "no arrow", "one operand"):
            result = einsum(spec, x, w, out_sharding=out)
            plain = jnp.einsum(spec, x, w, out_sharding=out)
            assert jax.typeof(result) == jax.typeof(plain)
            np.testing.assert_array_equal(result, plain)


SPECS = {
    "gather rows": (P("Y"), P(None, "Y"), P(None, "Y")),
    "scatter columns": (P(None, "Y"), P("Y"), P(None, "Y")),
    "scatter rows": (P(None, "Y"), P("Y"), P("Y")),
    "allreduce": (P(None, "Y"), P("Y"), P()),
    "gather contraction": (P(None, "Y"), P(None, "Y"), P(None, "Y")),
}
EMPTY_OPTIONS = ("bdf", (jnp.float32, jnp.int32), (AxisType.Auto, AxisType.Explicit), list(SPECS))


@pytest.mark.parametrize(
    ("empty", "dtype", "axis_type", "name"),
    sampled(product(*EMPTY_OPTIONS), pairwise(*EMPTY_OPTIONS)),
)
def test_empty_arrays_use_jnp_einsum(
    empty: str, dtype: Any, axis_type: AxisType, name: str
) -> None:
    specs = SPECS[name]
    lengths = {**LENGTHS, empty: 0}
    with jax.set_mesh(jax.make_mesh((2, 4), ("X", "Y"), axis_types=(axis_type,) * 2)):
        x, w = (
            jax.device_put(jnp.ones([lengths[n] for n in labels], dtype), sharding)
            for labels, sharding in zip(("bd", "df"), specs[:2], strict=True)
        )
        explanation = explain_einsum("bd,df->bf", x, w, out_sharding=specs[2])
        assert str(explanation) == f"jnp.einsum: {empty!r} is empty: there is nothing to multiply"
        result = einsum("bd,df->bf", x, w, out_sharding=specs[2])
        assert result.dtype == dtype
        assert result.shape == (lengths["b"], lengths["f"])
        assert not result.size or not np.any(result)


def test_unreduced_sums_use_jnp_einsum() -> None:
    with jax.set_mesh(jax.make_mesh((2, 4), ("X", "Y"))):
        x, w = _operands("bd,df->bf", P("X", "Y"), P("Y"))
        out = P("X", None, unreduced={"Y"})
        assert explain_einsum("bd,df->bf", x, w, out_sharding=out).reason == (
            "a sum is kept unreduced"
        )
        assert jax.typeof(einsum("bd,df->bf", x, w, out_sharding=out)).sharding.spec == out


def test_inside_shard_map_the_reason_names_the_ring_functions() -> None:
    with jax.set_mesh(jax.make_mesh((2, 4), ("X", "Y"))):
        x, w = _operands("bd,df->bf", P("X"), P(None, "Y"))
        reasons = []

        def local(x: jax.Array, w: jax.Array) -> jax.Array:
            reasons.append(explain_einsum("bd,df->bf", x, w, out_sharding=P()).reason)
            return x @ w

        specs = (P("X"), P(None, "Y"))
        jax.jit(jax.shard_map(local, in_specs=specs, out_specs=P("X", "Y"))).lower(x, w)
    assert reasons == ["inside shard_map; call the ring functions themselves there"]


@pytest.mark.parametrize(("option", "value"), [("direction", "left"), ("loop", "twice")])
def test_an_unknown_option_is_rejected(option: str, value: str) -> None:
    options: Any = {option: value}
    with (
        jax.set_mesh(jax.make_mesh((2, 4), ("X", "Y"))),
        pytest.raises(ValueError, match=f"einsum: {option} must be .* not '{value}'"),
    ):
        einsum("bd,df->bf", jnp.ones((8, 8)), jnp.ones((8, 8)), out_sharding=P(), **options)


def test_explain_einsum_accepts_shapes() -> None:
    mesh = jax.make_mesh((2, 4), ("X", "Y"))
    x = jax.ShapeDtypeStruct(
        (1 << 20, 1 << 14), jnp.bfloat16, sharding=NamedSharding(mesh, P("X", "Y"))
    )
    w = jax.ShapeDtypeStruct(
        (1 << 14, 1 << 16), jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "Y"))
    )
    explanation = explain_einsum("bd,df->bf", x, w, out_sharding=P("X", "Y"))
    # Each device sends a quarter of half the rows in three permutes, half of it in each direction.
    bytes_per_direction = 3 * (1 << 19) * (1 << 12) * 2 // 2
    assert explanation.bytes_per_axis == {"X": 0, "Y": bytes_per_direction}
    assert str(explanation) == (
        "gather-matmul: contracted 'd' of x is gathered over 'Y'; "
        f"bytes per device each way, Y: {bytes_per_direction:,}"
    )
