"""Inject faults into the computations of emulated chips. Only this module reads `fault.json`.

`$DRUMLINE_MACHINE` is the folder of a physical machine of the emulator. If the machine has a fault,
this module occasionally flips a bit in the outputs of its devices. Outside the emulator,
`inject_compute_fault` and `inject_link_fault` return their input.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Tree = TypeVar("Tree")

_FIRST_CALLS = 4
"""The maximum number of calls before the initial fault. It keeps tests short."""
_CALLS_PER_FAULT = 3
"""The mean number of calls between later faults."""


@dataclass(frozen=True)
class EmulatedFault:
    """The fault of an emulated machine."""

    mode: str
    """`lies`, `nan` or `bad-link`."""
    chip: int
    """The index of the faulty device on its host."""
    from_step: int
    seed: int
    marker_file: str
    """A file that exists after a program has reached `from_step`."""

    def is_due(self, step: int | None) -> bool:
        """Return True from `from_step` on. At that step, write the marker."""
        if self.from_step <= 0 or os.path.exists(self.marker_file):
            return True
        if step is None or step < self.from_step:
            return False
        with suppress(OSError), open(self.marker_file, "a"):
            pass
        return True


class _FaultCache:
    """The latest fault in the machine's file, and the number of calls with it."""

    def __init__(self) -> None:
        self.version: object = None
        self.fault: EmulatedFault | None = None
        self.calls = 0

    def read(self, folder: str) -> EmulatedFault | None:
        file = os.path.join(folder, "fault.json")
        try:
            status = os.stat(file)
        except OSError:
            self.version, self.fault = None, None
            return None
        version = (file, status.st_mtime_ns, status.st_ino)
        if version != self.version:
            self.fault, self.calls = _read_fault(file, folder), 0
            # The file may be incomplete. Read it again.
            self.version = None if self.fault is None else version
        return self.fault


_cache = _FaultCache()


def current_fault() -> EmulatedFault | None:
    """Return the fault in this machine's file, or None outside the emulator."""
    if not os.environ.get("DRUMLINE_EMULATED"):
        return None
    folder = os.environ.get("DRUMLINE_MACHINE")
    return _cache.read(folder) if folder else None


def inject_compute_fault(tree: Tree, *, step: int | None = None) -> Tree:
    """Return computed arrays, possibly with an incorrect element.

    Args:
        tree: The outputs of programs. Only shards on the faulty device change, so the replicas of
            a replicated array then differ.
        step: The training step. Without it, as in a burn-in, a fault from a later step on needs
            its marker.
    """
    fault = current_fault()
    if fault is None or fault.mode not in {"lies", "nan"} or not fault.is_due(step):
        return tree
    return _inject(tree, fault, _set_nan if fault.mode == "nan" else flip_bit)


def inject_link_fault(tree: Tree) -> Tree:
    """Return arrays received over links, possibly with an incorrect element on the faulty chip."""
    fault = current_fault()
    if fault is None or fault.mode != "bad-link" or not fault.is_due(None):
        return tree
    return _inject(tree, fault, flip_bit)


def modify_shard(array: Any, device: Any, modify: Callable[[np.ndarray], None]) -> Any:
    """Return the array with `modify` applied to the shard on this device."""
    import jax

    shards = []
    for shard in array.addressable_shards:
        if shard.device != device:
            shards.append(shard.data)
            continue
        values = np.array(shard.data)
        modify(values)
        shards.append(jax.device_put(values, device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def flip_bit(values: np.ndarray, number: int) -> None:
    """Flip a bit of an element. The number selects the bit and the element."""
    size = values.dtype.itemsize
    # Flip only the lowest bit of a boolean, so that it stays a valid boolean.
    bit, element = divmod(number, values.size)
    bit %= 1 if values.dtype == np.bool_ else 8 * size
    raw = values.reshape(-1).view(np.uint8)
    raw[element * size + bit // 8] ^= np.uint8(1 << bit % 8)


def _set_nan(values: np.ndarray, number: int) -> None:
    values.reshape(-1)[number % values.size] = np.nan


def _inject(tree: Tree, fault: EmulatedFault, modify: Callable[[np.ndarray, int], None]) -> Tree:
    """Return the tree, with an element changed if the call is due for a fault."""
    import jax

    devices = jax.local_devices()
    if not 0 <= fault.chip < len(devices):
        return tree
    device = devices[fault.chip]
    leaves, structure = jax.tree.flatten(tree)
    candidates = [i for i, leaf in enumerate(leaves) if _can_change(leaf, device, fault.mode)]
    if not candidates:
        return tree
    call = _cache.calls
    _cache.calls += 1
    if call != fault.seed % _FIRST_CALLS and _hash(fault.seed, call) % _CALLS_PER_FAULT:
        return tree
    number = _hash(fault.seed + 1, call)
    index = candidates[number % len(candidates)]
    leaves[index] = modify_shard(leaves[index], device, lambda values: modify(values, number >> 8))
    modified: Tree = jax.tree.unflatten(structure, leaves)
    return modified


def _can_change(leaf: Any, device: Any, mode: str) -> bool:
    """Return True if a leaf has a shard on the device of a type that the fault can change."""
    import jax
    import jax.numpy as jnp

    if not isinstance(leaf, jax.Array) or not leaf.size or device not in leaf.sharding.device_set:
        return False
    dtypes = (jnp.inexact,) if mode == "nan" else (jnp.number, jnp.bool_)
    return any(jnp.issubdtype(leaf.dtype, dtype) for dtype in dtypes)


def _hash(seed: int, call: int) -> int:
    """Return a pseudorandom number below 2⁶⁴ by splitmix64."""
    state = (seed * 0x9E3779B97F4A7C15 + call * 0xD1B54A32D192ED03 + 1) & (2**64 - 1)
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return state ^ (state >> 31)


def _read_fault(file: str, folder: str) -> EmulatedFault | None:
    try:
        with open(file) as opened:
            fields = json.load(opened)
        return EmulatedFault(
            mode=str(fields["how"]),
            chip=int(fields.get("chip", 0)),
            from_step=int(fields.get("from_step", 0)),
            seed=int(fields.get("seed", 0)),
            marker_file=os.path.join(folder, "began"),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
