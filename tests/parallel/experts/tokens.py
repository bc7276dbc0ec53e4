"""Tokens, assignments and the slow truth the tests compare with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec

from drumline.parallel.experts.layer import MoEBlock
from drumline.parallel.experts.matmul import expert_matmul

P: Any = PartitionSpec
Arrays = tuple[np.ndarray[Any, Any], ...]

KINDS = ("uniform", "one expert", "empty experts", "sorted", "adversarial")


@dataclass(frozen=True)
class Case:
    """Random operands of one expert product."""

    a: np.ndarray[Any, Any]
    w: np.ndarray[Any, Any]
    gates: np.ndarray[Any, Any]
    dout: np.ndarray[Any, Any]


def draw(experts: int, k: int, *, tokens: int = 64, d: int = 8, f: int = 12) -> Case:
    rng = np.random.default_rng(experts * 10 + k)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return rng.normal(size=shape).astype(np.float32)

    return Case(normal(tokens, d), normal(experts, d, f), normal(tokens, k), normal(tokens, f))


def assign(kind: str, experts: int, k: int, tokens: int = 64) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(3)
    if kind == "one expert":
        chosen = np.full((tokens, k), experts - 1)
    elif kind == "empty experts":
        chosen = rng.choice([0, experts // 2], (tokens, k))
    elif kind == "out of range":
        chosen = rng.integers(0, experts, (tokens, k))
        chosen[::3, 0], chosen[1::4, -1], chosen[7] = -1, experts, 2**30
    elif kind == "sorted":
        chosen = np.sort(rng.integers(0, experts, (tokens, k)), axis=0)
    elif kind == "adversarial":
        # The first half of the tokens floods one expert, the rest trickle to each other in turn,
        # and one token sits alone with an expert of its own.
        chosen = np.arange(tokens * k).reshape(tokens, k) % max(experts - 1, 1)
        chosen[: tokens // 2] = 1
        chosen[tokens // 3] = experts - 1
    else:
        chosen = rng.integers(0, experts, (tokens, k))
    return chosen.astype(np.int32)


def truth(case: Case, assignment: np.ndarray[Any, Any]) -> Arrays:
    """Output and gradients by a loop over tokens in float64; slots out of range count nothing."""
    a, w, gates, dout = (x.astype(np.float64) for x in (case.a, case.w, case.gates, case.dout))
    out = np.zeros((a.shape[0], w.shape[2]))
    da, dw, dgates = np.zeros_like(a), np.zeros_like(w), np.zeros_like(gates)
    for s, slots in enumerate(assignment):
        for j, e in enumerate(slots):
            if not 0 <= e < len(w):
                continue
            y, g = a[s] @ w[e], gates[s, j]
            out[s] += g * y
            dgates[s, j] = dout[s] @ y
            da[s] += g * (w[e] @ dout[s])
            dw[e] += g * np.outer(a[s], dout[s])
    return out, da, dw, dgates


def drawn_block(width: int, hidden: int, experts: int, k: int) -> MoEBlock:
    """A block of random matrices, with nothing compiled for it."""
    rng = np.random.default_rng(0)
    block = eqx.filter_eval_shape(MoEBlock, width, hidden, experts, k=k, key=jax.random.key(0))

    def fill(leaf: jax.ShapeDtypeStruct) -> Any:
        if len(leaf.shape) == 1:
            return np.ones(leaf.shape, np.float32)
        fan_in = leaf.shape[0 if len(leaf.shape) == 2 else 1]
        return (rng.normal(size=leaf.shape) * fan_in**-0.5).astype(np.float32)

    filled: MoEBlock = jax.tree.map(fill, block)
    return filled


def mesh_of(x: int, y: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: x * y]).reshape(x, y), ("X", "Y"))


def described(sizes: tuple[int, ...], names: str, platform: str = "cuda") -> AbstractMesh:
    """A mesh of devices that are not here; for a GPU's, kernels have to know which GPU."""
    hopper = AbstractDevice("NVIDIA H200", None, "cuda") if platform == "cuda" else None
    kinds = (AxisType.Auto,) * len(sizes)
    return AbstractMesh(sizes, tuple(names), kinds, abstract_device=hopper)


def sharded(
    mesh: Mesh, exchange: Any, *, columns: str | None = "Y", check_vma: bool = True, **options: Any
) -> Callable[..., jax.Array]:
    function = partial(
        expert_matmul, axis_name="X", gather_axis_name=columns, exchange=exchange, **options
    )
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=(P("X", columns), P("X", None, "Y"), P("X"), P("X")),
        out_specs=P("X", "Y"),
        check_vma=check_vma,
    )


def with_gradients(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """Return a compiled function of (case, assignment) giving output and all gradients."""

    def run(a: Any, w: Any, assignment: Any, gates: Any, dout: Any) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda a, w, g: function(a, w, assignment, g), a, w, gates)
        return (out, *pull(dout))

    compiled = jax.jit(run)
    return lambda case, assignment: compiled(case.a, case.w, assignment, case.gates, case.dout)


def assert_true(
    got: tuple[jax.Array, ...], case: Case, assignment: np.ndarray[Any, Any], what: str = ""
) -> None:
    assert_close(got, truth(case, assignment), what)


def assert_close(got: tuple[jax.Array, ...], expected: Arrays, what: str = "") -> None:
    names = ("out", "gradient of a", "gradient of w", "gradient of gates")
    for name, value, exact in zip(names, got, expected, strict=True):
        np.testing.assert_allclose(value, exact, rtol=2e-5, atol=5e-5, err_msg=f"{name}, {what}")
