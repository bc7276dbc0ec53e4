"""X"""

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
_written_for: ContextVar[tuple[Target, str | None] | None] = ContextVar("written", default=None)


@dataclass(frozen=True)
class TPU:
    """What decides of a device: FLOP/s in bfloat16, bytes/s of a link one way and of its memory."""

    peak: float
    link: float
    memory: float
    late_hops: bool = False
    """Whether its compiler, left to itself, begins hops later than they need."""


_KINDS = {
    "TPU v2": TPU(2.3e13, 6e10, 3.6e11),
    "TPU v3": TPU(6.15e13, 1e11, 4.5e11),
    "TPU v4": TPU(2.75e14, 4.5e10, 1.2e12, late_hops=True),
    "TPU v5 lite": TPU(1.97e14, 4.5e10, 8.2e11),
    "TPU v5": TPU(4.59e14, 9e10, 2.8e12, late_hops=True),
    "TPU v6 lite": TPU(9.2e14, 9e10, 1.6e12, late_hops=True),
    "TPU7x": TPU(1.15e15, 9e10, 3.7e12),
}
_OTHER_NAMES = {
    "TPU v5e": "TPU v5 lite",
    "TPU v5p": "TPU v5",
    "TPU v6e": "TPU v6 lite",
    "TPU 7x": "TPU7x",
}


def tpu_of(kind: str) -> TPU:
    """The chip of a device kind as JAX tells it; one that is not known counts as a v5e."""
    return _KINDS.get(_OTHER_NAMES.get(kind, kind), _KINDS["TPU v5 lite"])


@contextmanager
def written_for(target: Target, kind: str | None = None) -> Iterator[None]:
    """Rings that are traced within are written for one target, wherever they will run.

    For a look at the TPU's form on other devices, which compute the same with it. `kind` is the
    TPU's, as JAX tells it; without one, that of the devices that are there.
    """
    token = _written_for.set((target, kind))
    try:
        yield
    finally:
        _written_for.reset(token)


def target_here(mesh: Mesh | AbstractMesh | None = None) -> Target:
    """What rings are written for here, as far as tracing can know: the mesh's devices, or ours."""
    told = _written_for.get()
    if told is not None:
        return told[0]
    device = _device(mesh)
    platform = jax.default_backend() if device is None else device.platform
    return "tpu" if platform == "tpu" else "other"


def chip_here(mesh: Mesh | AbstractMesh | None = None) -> TPU | None:
    """The TPU that rings are written for here; None for other devices."""
    if target_here(mesh) != "tpu":
        return None
    told = _written_for.get()
    if told is not None and told[1] is not None:
        return tpu_of(told[1])
    device = _device(mesh)
    return tpu_of(str((jax.devices()[0] if device is None else device).device_kind))


def _device(mesh: Mesh | AbstractMesh | None) -> Any:
    if isinstance(mesh, Mesh):
        return mesh.devices.flat[0]
    here = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return getattr(here, "abstract_device", None)


_HOPS_EARLY = {"xla_lhs_output_fusion_latency_multiplier": 0.1}


def overlap_options(mesh: Mesh | AbstractMesh | None = None) -> dict[str, float]:
    """Options for the compiler of a program with rings: `jax.jit(f, compiler_options=…)`.

    `drumline.train.fit` gives them to its step. Nothing is returned where they gain nothing (on a
    v5e, and off the TPU), or where the compiler that is installed does not know them.

    Args:
        mesh: what the program will run on; without one, the devices that are here.
    """
    chip = chip_here(mesh)
    if chip is None or not chip.late_hops:
        return {}
    # Elsewhere it is another process that compiles, for a TPU that is not here.
    known = jax.default_backend() != "tpu" or _known_here()
    return dict(_HOPS_EARLY) if known else {}


@cache
def _known_here() -> bool:
    """Whether the compiler of this process takes the options, by trying."""
    try:
        jax.jit(lambda x: x + 1, compiler_options=_HOPS_EARLY).lower(0.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True
