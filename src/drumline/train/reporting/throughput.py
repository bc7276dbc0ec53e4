"""How fast the steps are: items a second, and the share of what the chips could do (MFU)."""

import jax

from drumline.chips.catalogue import device_kind


def peak_flops(kind: str) -> float | None:
    """bf16 FLOP/s of one JAX device; None for one that nobody has told us about, as a CPU."""
    known = device_kind(kind)
    return known.chip.peak_bf16_flops / known.devices_per_chip if known else None


def mfu(flops_per_second: float, devices: list[jax.Device]) -> float | None:
    """The share of these devices' peak; None where either is unknown."""
    peaks = [peak_flops(device.device_kind) for device in devices]
    if flops_per_second <= 0 or not all(peaks):
        return None
    return flops_per_second / sum(peak for peak in peaks if peak)
