"""A TPU for kernels that are emulated, whose tiles and VMEM Pallas asks for."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture
def a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device is a v5p chip, or says so; JAX has no public way to pretend."""
    chip = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5P, 2)
    inside = ["jax._src.pallas.mosaic.tpu_info", "jax._src.tpu_info"]  # until 0.11, and since
    modules = [pltpu, *(importlib.import_module(name) for name in inside if find_spec(name))]
    for module in modules:
        if hasattr(module, "get_tpu_info"):
            monkeypatch.setattr(module, "get_tpu_info", lambda: chip)
