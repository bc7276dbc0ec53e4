"""A fixture that emulates a TPU for the kernels, because Pallas asks for its tiles and VMEM."""

from __future__ import annotations

import importlib
from importlib.util import find_spec

import pytest
from jax.experimental.pallas import tpu as pltpu


@pytest.fixture
def emulated_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every device report that it is a v5p chip. JAX has no public API for this."""
    chip = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V5P, 2)
    private_modules = [
        "jax._src.pallas.mosaic.tpu_info",
        "jax._src.tpu_info",
    ]  # until JAX 0.11, and since
    modules = [
        pltpu,
        *(importlib.import_module(name) for name in private_modules if find_spec(name)),
    ]
    for module in modules:
        if hasattr(module, "get_tpu_info"):
            monkeypatch.setattr(module, "get_tpu_info", lambda: chip)
