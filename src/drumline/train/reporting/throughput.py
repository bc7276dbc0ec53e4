"""How fast the steps are: items a second, and the share of what the chips could do (MFU)."""

import re

import jax

from drumline.chips import chip

TPUS = {
    "TPU v2": ("v2", 2),
    "TPU v3": ("v3", 2),
    "TPU v4": ("v4", 1),
    "TPU v5 lite": ("v5e", 1),
    "TPU v5e": ("v5e", 1),
    "TPU v5": ("v5p", 1),
    "TPU v5p": ("v5p", 1),
    "TPU v6 lite": ("v6e", 1),
    "TPU v6e": ("v6e", 1),
    "TPU7x": ("7x", 2),
}
"""Device kind as JAX tells it → chip, and how many JAX devices one chip is."""
_GPU = re.compile(r"\b(V100|A100|L40|H100|H200|B100|B200)\b")


def peak_flops(device_kind: str) -> float | None:
    """bf16 FLOP/s of one JAX device; None for one that nobody has told us about, as a CPU."""
    if device_kind in TPUS:
        name, devices = TPUS[device_kind]
        return chip(name).peak_bf16_flops / devices
    gpu = _GPU.search(device_kind)
    return chip(gpu[1]).peak_bf16_flops if gpu else None


def mfu(flops_per_second: float, devices: list[jax.Device]) -> float | None:
    """The share of these devices' peak; None where either is unknown."""
    peaks = [peak_flops(device.device_kind) for device in devices]
    if flops_per_second <= 0 or not all(peaks):
        return None
    return flops_per_second / sum(peak for peak in peaks if peak)
