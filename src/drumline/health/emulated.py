"""CPU devices that lie, for the emulator: the one place that reads a machine's `fault.json`.

A physical machine of the emulator is a folder, named by `$DRUMLINE_MACHINE`. If it has a fault,
what its devices computed passes through here on its way to whoever looks at it, and now and then
one bit of it is another. Anywhere else, `as_computed` and `as_sent` return what they are given.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Tree = TypeVar("Tree")

_SOON = 4
"""Calls within which a fault strikes for the first time: stories should be quick."""
_NOW_AND_THEN = 3
"""After that, it strikes in about one call of so many."""


@dataclass(frozen=True)
class EmulatedFault:
    """What is wrong with this machine."""

    how: str
    """`lies`, `nan` or `bad-link`."""
    chip: int
    """The lying device, counted from 0 among the host's own."""
    from_step: int
    seed: int
    began: str
    """The file that says that the fault is there from the start of every program."""

    def is_due(self, step: int | None) -> bool:
        """Whether it shows by now; a program that reaches the first bad step writes that down."""
        if self.from_step <= 0 or os.path.exists(self.began):
            return True
        if step is None or step < self.from_step:
            return False
        with suppress(OSError), open(self.began, "a"):
            pass
        return True


class _Machine:
    """The machine as it was last seen, and how often its fault could have struck."""

    def __init__(self) -> None:
        self.version: object = None
        self.fault: EmulatedFault | None = None
        self.calls = 0

    def look(self, folder: str) -> EmulatedFault | None:
        file = os.path.join(folder, "fault.json")
        try:
            status = os.stat(file)
        except OSError:
            self.version, self.fault = None, None
            return None
        version = (file, status.st_mtime_ns, status.st_ino)
        if version != self.version:
            self.fault, self.calls = _read(file, folder), 0
            # Caught while it was being written: the next call reads it again.
            self.version = None if self.fault is None else version
        return self.fault


_machine = _Machine()


def fault_here() -> EmulatedFault | None:
    """The fault of this machine, as its file has it now; None outside the emulator."""
    if not os.environ.get("DRUMLINE_EMULATED"):
        return None
    folder = os.environ.get("DRUMLINE_MACHINE")
    return _machine.look(folder) if folder else None


def as_computed(tree: Tree, *, step: int | None = None) -> Tree:
    """What the chips say they computed: these arrays, or nearly.

    Args:
        tree: arrays that programs have computed. Only what lies on the bad device changes, so the
            replicas of a replicated array then differ.
        step: the training's step; without one, as in a burn-in, a fault that begins at a later
            step shows only where an earlier program has reached it.
    """
    fault = fault_here()
    if fault is None or fault.how not in {"lies", "nan"} or not fault.is_due(step):
        return tree
    return _struck(tree, fault, _into_nan if fault.how == "nan" else flip_bit)


def as_sent(tree: Tree) -> Tree:
    """What arrived over the links: these arrays, or nearly, where a link into a chip is bad."""
    fault = fault_here()
    if fault is None or fault.how != "bad-link" or not fault.is_due(None):
        return tree
    return _struck(tree, fault, flip_bit)


def changed(array: Any, device: Any, change: Callable[[np.ndarray], None]) -> Any:
    """The same array, but for what `change` does to the shard that lies on one device."""
    import jax

    shards = []
    for shard in array.addressable_shards:
        if shard.device != device:
            shards.append(shard.data)
            continue
        values = np.array(shard.data)
        change(values)
        shards.append(jax.device_put(values, device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def flip_bit(values: np.ndarray, number: int) -> None:
    """Flip one bit of one element, both chosen by a number."""
    size = values.dtype.itemsize
    # Of a boolean only one bit may change: another makes a value that is neither true nor false.
    bit, element = divmod(number, values.size)
    bit %= 1 if values.dtype == np.bool_ else 8 * size
    raw = values.reshape(-1).view(np.uint8)
    raw[element * size + bit // 8] ^= np.uint8(1 << bit % 8)


def _into_nan(values: np.ndarray, number: int) -> None:
    values.reshape(-1)[number % values.size] = np.nan


def _struck(tree: Tree, fault: EmulatedFault, change: Callable[[np.ndarray, int], None]) -> Tree:
    """The tree, in which the fault has changed one element if this call is one of its calls."""
    import jax

    local = jax.local_devices()
    if not 0 <= fault.chip < len(local):
        return tree
    device = local[fault.chip]
    leaves, structure = jax.tree.flatten(tree)
    hit = [i for i, leaf in enumerate(leaves) if _can_change(leaf, device, fault.how)]
    if not hit:
        return tree
    call = _machine.calls
    _machine.calls += 1
    if call != fault.seed % _SOON and _mixed(fault.seed, call) % _NOW_AND_THEN:
        return tree
    number = _mixed(fault.seed + 1, call)
    which = hit[number % len(hit)]
    leaves[which] = changed(leaves[which], device, lambda values: change(values, number >> 8))
    struck: Tree = jax.tree.unflatten(structure, leaves)
    return struck


def _can_change(leaf: Any, device: Any, how: str) -> bool:
    """Whether a leaf has numbers on that device, and for NaN such as can be NaN."""
    import jax
    import jax.numpy as jnp

    if not isinstance(leaf, jax.Array) or not leaf.size or device not in leaf.sharding.device_set:
        return False
    kinds = (jnp.inexact,) if how == "nan" else (jnp.number, jnp.bool_)
    return any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds)


def _mixed(seed: int, number: int) -> int:
    """A number below 2⁶⁴ without visible order: splitmix64 of both."""
    word = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 1) & (2**64 - 1)
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return word ^ (word >> 31)


def _read(file: str, folder: str) -> EmulatedFault | None:
    try:
        with open(file) as opened:
            told = json.load(opened)
        return EmulatedFault(
            how=str(told["how"]),
            chip=int(told.get("chip", 0)),
            from_step=int(told.get("from_step", 0)),
            seed=int(told.get("seed", 0)),
            began=os.path.join(folder, "began"),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
