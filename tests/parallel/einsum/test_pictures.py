"""The pictures in the docs are current, and match the rings."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from drumline.parallel.rings.ring import Lane, Ring

DOCS = Path(__file__).parents[3] / "docs"
SCRIPT: dict[str, Any] = runpy.run_path(str(DOCS / "draw_rings.py"))


@pytest.mark.parametrize("name", SCRIPT["DRAWN"])
def test_the_picture_is_current(name: str) -> None:
    path = DOCS / "pictures" / f"{name}.svg"
    assert path.read_text(encoding="utf-8") == SCRIPT["DRAWN"][name](), (
        f"run: python docs/draw_rings.py (writes {path.name})"
    )
    ET.parse(path)  # noqa: S314 - the project's own file
    assert f"pictures/{name}.svg" in (DOCS / "overlap.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("shift", [1, -1])
def test_the_pictures_name_the_shards_that_arrive(shift: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:4]), ("Y",))

    def sources() -> jax.Array:
        ring = Ring("Y", 4, "both", "auto", None)
        return jnp.stack([ring.upstream(Lane(shift, 0, 1), step) for step in range(5)])[None]

    sharding = P("Y")  # type: ignore[no-untyped-call]
    owners = np.asarray(
        jax.jit(jax.shard_map(sources, mesh=mesh, in_specs=(), out_specs=sharding))()
    )
    for device in range(4):
        for step in range(4):
            assert SCRIPT["source"](device, step, shift) == owners[device, step]
            assert SCRIPT["owner"](device, step, shift) == owners[device, step + 1]
