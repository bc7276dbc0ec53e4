"""The sharded matmuls that have a ring in `einsum`, on several meshes, with exact results.

`X` stands for the axes of data parallelism and `Y` for those of the ring. A `Wiring` maps them to
the axes of a mesh.
"""

# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

LENGTHS = {"b": 4, "s": 24, "d": 24, "f": 32, "h": 8, "k": 3}
FLOAT32_ROUNDING = 2.0**-24
"""The unit roundoff of float32."""

Axis = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Wiring:
    """A mesh with its axes for X and Y."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    x: Axis
    y: Axis

    def mesh(self) -> Mesh:
        return jax.make_mesh(self.sizes, self.names)

    def spec(self, letters: str) -> P:
        return P(*({"X": self.x, "Y": self.y, ".": None}[letter] for letter in letters))


WIRINGS = {
    "2x4": Wiring((2, 4), ("X", "Y"), "X", "Y"),
    "8": Wiring((8,), ("Y",), None, "Y"),
    "2x2x2": Wiring((2, 2, 2), ("X", "Y", "Z"), "X", ("Y", "Z")),
}


@dataclass(frozen=True)
class Case:
    """One sharded matmul. Letters give the axis of each dimension."""

    spec: str
    x: str
    w: str
    out: str
    choice: str
    reason: str

    @property
    def labels(self) -> tuple[str, str, str]:
        operands, out = self.spec.split("->")
        x, w = operands.split(",")
        return x, w, out


CASES = {
    "gather contraction": Case(
        "bsd,df->bsf", "X.Y", ".Y", "X.Y", "gather-matmul", "contracted 'd' of x"
    ),
    "gather rows": Case("bsd,df->bsf", "XY.", ".Y", "X.Y", "gather-matmul", "'s' of x"),
    "gather rows, heads": Case("bsd,dhk->bshk", "XY.", ".Y.", "X.Y.", "gather-matmul", "'s' of x"),
    "gather weights": Case(
        "bsd,df->bsf", ".Y.", "Y.", ".Y.", "gather-matmul", "contracted 'd' of w"
    ),
    "gather weights' columns": Case("sd,df->sf", "Y.", ".Y", "Y.", "gather-matmul", "'f' of w"),
    "scatter columns": Case("bsf,fd->bsd", "X.Y", "Y.", "X.Y", "matmul-scatter", "'d' of the"),
    "scatter columns, heads": Case(
        "bsf,fkd->bskd", "X.Y", "Y..", "X..Y", "matmul-scatter", "'d' of the"
    ),
    "scatter rows": Case("bsf,fd->bsd", "X.Y", "Y.", "XY.", "matmul-scatter", "'s' of the"),
    "scatter rows, heads": Case(
        "bskh,khd->bsd", "X..Y", ".Y.", "XY.", "matmul-scatter", "'s' of the"
    ),
    "allreduce": Case("bsf,fd->bsd", "X.Y", "Y.", "X..", "matmul-allreduce", "contracted 'f'"),
    "allreduce, transposed": Case(
        "fsb,df->dbs", "Y.X", ".Y", ".X.", "matmul-allreduce", "contracted 'f'"
    ),
}


SAMPLE = ("gather contraction", "gather rows", "scatter columns", "scatter rows", "allreduce")
"""One case for each ring, without other orders of the dimensions and operands."""


def operands(
    case: Case, wiring: Wiring, mesh: Mesh, dtype: Any = jnp.float32, seed: int = 0
) -> tuple[jax.Array, jax.Array, P]:
    """Return random operands on their devices, and the result's spec."""
    rng = np.random.default_rng(seed)
    x, w, _ = case.labels

    def random_array(labels: str, letters: str) -> jax.Array:
        values = rng.normal(size=[LENGTHS[n] for n in labels]).astype(jnp.dtype(dtype))
        placed: jax.Array = jax.device_put(values, NamedSharding(mesh, wiring.spec(letters)))
        return placed

    return random_array(x, case.x), random_array(w, case.w), wiring.spec(case.out)


def compiled_text(function: Callable[..., Any], *arrays: Any) -> str:
    """Return the compiled program's HLO."""
    text = jax.jit(function).lower(*arrays).compile().as_text()
    assert text is not None
    return text


def relative_error(result: jax.Array, spec: str, a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Return the error of a matmul relative to its bound; at most 1 is correct.

    A float32-accumulated sum of K terms may lose `K·u·Σ|a||b|` in any order, with `u = 2^-24`. The
    result is then rounded once to its type.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    exact, size = np.einsum(spec, a, b), np.einsum(spec, np.abs(a), np.abs(b))
    labels, out = spec.split("->")
    terms = np.prod([LENGTHS[n] for n in set(labels) - set(out) - {","}])
    bound = terms * FLOAT32_ROUNDING * size
    bound += float(jnp.finfo(result.dtype).eps) / 2 * (np.abs(exact) + bound)
    return float(np.max(np.abs(np.asarray(result, np.float64) - exact) / bound))
