"""Tokens, assignments and the slow reference of the tests."""

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
    """Random operands of one expert matmul."""

    a: np.ndarray[Any, Any]
    w: np.ndarray[Any, Any]
    gates: np.ndarray[Any, Any]
    dout: np.ndarray[Any, Any]


def random_case(experts: int, k: int, *, tokens: int = 64, d: int = 8, f: int = 12) -> Case:
    rng = np.random.default_rng(experts * 10 + k)

    def random_array(*shape: int) -> np.ndarray[Any, Any]:
        return rng.normal(size=shape).astype(np.float32)

    return Case(
        random_array(tokens, d),
        random_array(experts, d, f),
        random_array(tokens, k),
        random_array(tokens, f),
    )


def assign(kind: str, experts: int, k: int, tokens: int = 64) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(3)
    if kind == "one expert":
        assignment = np.full((tokens, k), experts - 1)
    elif kind == "empty experts":
        assignment = rng.choice([0, experts // 2], (tokens, k))
    elif kind == "out of range":
        assignment = rng.integers(0, experts, (tokens, k))
        assignment[::3, 0], assignment[1::4, -1], assignment[7] = -1, experts, 2**30
    elif kind == "sorted":
        assignment = np.sort(rng.integers(0, experts, (tokens, k)), axis=0)
    elif kind == "adversarial":
        # Half of the tokens go to one expert, the rest to the other experts in turn, and one token
        # is alone with its expert.
        assignment = np.arange(tokens * k).reshape(tokens, k) % max(experts - 1, 1)
        assignment[: tokens // 2] = 1
        assignment[tokens // 3] = experts - 1
    else:
        assignment = rng.integers(0, experts, (tokens, k))
    return assignment.astype(np.int32)


def float64_reference(case: Case, assignment: np.ndarray[Any, Any]) -> Arrays:
    """Return output and gradients from a float64 loop over tokens. Slots out of range are
    ignored.
    """
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


def random_block(width: int, hidden: int, experts: int, k: int) -> MoEBlock:
    """Return a block of random matrices without compiling anything."""
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


def abstract_mesh(sizes: tuple[int, ...], names: str, platform: str = "cuda") -> AbstractMesh:
    """Return a mesh of absent devices. GPU kernels need to know the GPU."""
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
    """Return a compiled function of (case, assignment) that returns output and all gradients."""

    def run(a: Any, w: Any, assignment: Any, gates: Any, dout: Any) -> tuple[jax.Array, ...]:
        out, vjp_function = jax.vjp(lambda a, w, g: function(a, w, assignment, g), a, w, gates)
        return (out, *vjp_function(dout))

    compiled = jax.jit(run)
    return lambda case, assignment: compiled(case.a, case.w, assignment, case.gates, case.dout)


def assert_matches_reference(
    actual: tuple[jax.Array, ...], case: Case, assignment: np.ndarray[Any, Any], label: str = ""
) -> None:
    assert_close(actual, float64_reference(case, assignment), label)


def assert_close(actual: tuple[jax.Array, ...], expected: Arrays, label: str = "") -> None:
    names = ("out", "gradient of a", "gradient of w", "gradient of gates")
    for name, value, exact in zip(names, actual, expected, strict=True):
        np.testing.assert_allclose(value, exact, rtol=2e-5, atol=5e-5, err_msg=f"{name}, {label}")
