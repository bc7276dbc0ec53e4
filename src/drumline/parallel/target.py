"""The device that rings are written for, and compiler options for it.

A ring has two forms: one for the TPU's compiler, one for all others. The cost model of `einsum`
also needs the TPU's peak and bandwidths.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh

Target = Literal["tpu", "other"]
_override: ContextVar[tuple[Target, str | None] | None] = ContextVar("written", default=None)


@dataclass(frozen=True)
class TPU:
    """A TPU device.

    Attributes:
        peak_flops: bfloat16 FLOPs per second.
        link_bandwidth: bytes per second of a link in one direction.
        memory_bandwidth: bytes per second of the HBM.
    """

    peak_flops: float
    link_bandwidth: float
    memory_bandwidth: float
    late_permutes: bool = False
    """True if its compiler, by default, starts permutes later than necessary."""
    rings_in_models: bool = False
    """True if whole training steps are faster with rings where the cost model expects it
    (`benchmarks/whole_steps.py`). Elsewhere models use blocking collectives."""


_TPUS = {
    "TPU v2": TPU(2.3e13, 6e10, 3.6e11),
    "TPU v3": TPU(6.15e13, 1e11, 4.5e11),
    "TPU v4": TPU(2.75e14, 4.5e10, 1.2e12, late_permutes=True),
    "TPU v5 lite": TPU(1.97e14, 4.5e10, 8.2e11),
    "TPU v5": TPU(4.59e14, 9e10, 2.8e12, late_permutes=True, rings_in_models=True),
    "TPU v6 lite": TPU(9.2e14, 9e10, 1.6e12, late_permutes=True),
    "TPU7x": TPU(1.15e15, 9e10, 3.7e12),
}
_ALIASES = {
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
    "TPU 7x": "TPU7x",
}


def tpu_of(kind: str) -> TPU:
    """Return the TPU of a JAX device kind; an unknown kind counts as a v5e."""
    return _TPUS.get(_ALIASES.get(kind, kind), _TPUS["TPU v5 lite"])


@contextmanager
def trace_for(target: Target, kind: str | None = None) -> Iterator[None]:
    """Trace the rings in this context for a target, on any device.

    Other devices compute the same with the TPU's form. `kind` is the TPU's device kind in JAX, by
    default that of the current devices.
    """
    token = _override.set((target, kind))
    try:
        yield
    finally:
        _override.reset(token)


def current_target(mesh: Mesh | AbstractMesh | None = None) -> Target:
    """Return the target for the devices of a mesh; None is the current mesh or backend."""
    override = _override.get()
    if override is not None:
        return override[0]
    device = _mesh_device(mesh)
    platform = jax.default_backend() if device is None else device.platform
    return "tpu" if platform == "tpu" else "other"


def current_tpu(mesh: Mesh | AbstractMesh | None = None) -> TPU | None:
    """Return the TPU that rings are written for, or None for other devices."""
    if current_target(mesh) != "tpu":
        return None
    override = _override.get()
    if override is not None and override[1] is not None:
        return tpu_of(override[1])
    device = _mesh_device(mesh)
    return tpu_of(str((jax.devices()[0] if device is None else device).device_kind))


def _mesh_device(mesh: Mesh | AbstractMesh | None) -> Any:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0]
    active = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return getattr(active, "abstract_device", None)


_EARLY_PERMUTES = {"xla_lhs_output_fusion_latency_multiplier": 0.1}


def overlap_options(mesh: Mesh | AbstractMesh | None = None) -> dict[str, float]:
    """Return compiler options for programs with rings: `jax.jit(f, compiler_options=…)`.

    The TPU's scheduler assumes that a permute takes a fraction of the time that a link needs, and
    starts it too late to overlap with all matmuls beside it. These options make it assume shorter
    matmuls, so it starts a permute as soon as its operand is ready. `docs/overlap.md` has
    the compiler's estimates.

    `drumline.train.fit` sets the options for the step of a loss with permutes. The result is empty
    where they gain nothing (on a v5e, and off the TPU), or if the installed compiler does not know
    them.

    Args:
        mesh: the mesh of the program; None is the current devices.
    """
    chip = current_tpu(mesh)
    if chip is None or not chip.late_permutes:
        return {}
    # Without a local TPU, another process compiles.
    accepted = jax.default_backend() != "tpu" or _compiler_accepts()
    return dict(_EARLY_PERMUTES) if accepted else {}


@cache
def _compiler_accepts() -> bool:
    """Return True if the compiler of this process accepts the options. Try them once."""
    try:
        jax.jit(lambda x: x + 1, compiler_options=_EARLY_PERMUTES).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
