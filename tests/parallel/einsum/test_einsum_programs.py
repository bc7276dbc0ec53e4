"""Programs with a ring contain only permutes, with as many bytes as explained."""

from __future__ import annotations

import re
from collections import Counter
from itertools import cycle, product
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from drumline.parallel.einsum.sharded import einsum, explain_einsum
from tests.cases import sampled
from tests.parallel.einsum.products import CASES, SAMPLE, WIRINGS, compiled_text, operands

DIRECTIONS = ("both", "one")

_PERMUTE = re.compile(
    r"collective_permute.*?source_target_pairs = dense<(\[\[.*?\]\])>.*?: \(tensor<([^>]*)>\)"
)
_BYTES = {"f32": 4, "bf16": 2}
_COLLECTIVES = r"all-gather|all-reduce|reduce-scatter|all-to-all|collective-broadcast"


def _bytes_sent(text: str) -> Counter[str]:
    """Return the bytes that a device sends along each pattern of sources and targets."""
    bytes_by_pattern: Counter[str] = Counter()
    for pairs, shape in _PERMUTE.findall(text):
        *dims, element_type = shape.split("x")
        size = _BYTES[element_type]
        for dim in dims:
            size *= int(dim)
        bytes_by_pattern[pairs] += size
    return bytes_by_pattern


@pytest.mark.parametrize(
    ("name", "direction"),
    sampled(product(CASES, DIRECTIONS), list(zip(CASES, cycle(DIRECTIONS), strict=False))),
)
def test_the_lowered_program_sends_the_explained_bytes(name: str, direction: Any) -> None:
    # On eight devices shards have odd lengths, so their halves differ.
    for wiring, dtype in (("2x4", jnp.bfloat16), ("8", jnp.float32)):
        case, wiring_of_mesh = CASES[name], WIRINGS[wiring]
        mesh = wiring_of_mesh.mesh()
        with jax.set_mesh(mesh):
            x, w, out = operands(case, wiring_of_mesh, mesh, dtype)
            options: Any = {"out_sharding": out, "direction": direction, "loop": "unrolled"}
            explanation = explain_einsum(case.spec, x, w, **options)
            lowered = jax.jit(lambda x, w: einsum(case.spec, x, w, **options)).lower(x, w)  # noqa: B023
        bytes_by_pattern = _bytes_sent(lowered.as_text())
        assert len(bytes_by_pattern) == (2 if direction == "both" else 1)
        assert {axis: count for axis, count in explanation.bytes_per_axis.items() if count} == {
            "Y": max(bytes_by_pattern.values())
        }


@pytest.mark.parametrize("name", sampled(CASES, SAMPLE))
def test_the_compiled_program_has_no_other_collective(name: str) -> None:
    case, wiring_of_mesh = CASES[name], WIRINGS["2x4"]
    mesh = wiring_of_mesh.mesh()
    with jax.set_mesh(mesh):
        x, w, out = operands(case, wiring_of_mesh, mesh)
        ring = compiled_text(lambda x, w: einsum(case.spec, x, w, out_sharding=out), x, w)
        plain = compiled_text(lambda x, w: jnp.einsum(case.spec, x, w, out_sharding=out), x, w)
    assert "collective-permute" in ring
    assert not re.search(_COLLECTIVES, ring)
    # The plain program shows that the pattern matches collectives.
    assert re.search(_COLLECTIVES, plain)
