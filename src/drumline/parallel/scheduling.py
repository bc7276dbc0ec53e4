"""What to tell the TPU's compiler, so that the hops of a ring set out in time.

Its scheduler lets a transfer begin as late as its own figures allow, and does so as if a hop were
over in a fraction of the time that a link takes: beside a hop of three products' length it puts
one, and the program waits for the rest. Told that products are shorter than they are, it begins
hops as soon as what they send is there. `docs/overlap.md` has what that gains.
"""

from __future__ import annotations

from functools import cache

import jax
from jax.sharding import AbstractMesh, Mesh

from drumline.parallel.rings.ring import chip_here

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
