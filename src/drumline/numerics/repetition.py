"""Does a function give the same bits every time, and on every device?

Each local device runs the same compiled function on the same inputs several times. A device's own
result is the one it gave most often; the right one is what most of the devices gave that repeat at
all. Whatever differs is told by leaf, position and units in the last place. Bits are compared, so
that a NaN equals the same NaN, and 0.0 is not -0.0.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.numerics.mistakes import Mistake

Run = Callable[[Callable[..., Any], tuple[Any, ...], jax.Device], Any]
"""A compiled function, its inputs and a device → its outputs there."""


@dataclass(frozen=True)
class LeafDifference:
    """One leaf of the outputs, where its bits differ."""

    leaf: str
    """Its path; empty where the function returns a single array."""
    elements: int
    """How many differ."""
    size: int
    first: tuple[int, ...]
    """The first that differs, row by row."""
    ulps: int | None
    """The largest difference in units in the last place, for integers in ones; None where nothing
    but NaNs differ, which have no distance."""

    def __str__(self) -> str:
        """What differs, without a verb."""
        at = f"[{', '.join(map(str, self.first))}]" if self.first else ""
        far = "NaN against other bits" if self.ulps is None else f"up to {self.ulps:,} ulp"
        return (
            f"{self.leaf or 'output'}: {self.elements:,} of {self.size:,} elements, {far}, "
            f"first at {self.leaf or 'output'}{at}"
        )


@dataclass(frozen=True)
class DeviceRuns:
    """How one device did."""

    device: str
    repeats: bool
    """Whether all of its runs gave the same bits."""
    odd_runs: tuple[int, ...]
    """The runs, from 0, that did not give what most of its runs gave."""
    agrees: bool
    """Whether what most of its runs gave is what most devices gave."""
    among_runs: tuple[LeafDifference, ...]
    """Between its own result and the first odd run."""
    from_others: tuple[LeafDifference, ...]
    """Between what most devices gave and its own result."""


@dataclass(frozen=True)
class Repeated:
    """How all devices did."""

    runs: int
    devices: tuple[DeviceRuns, ...]
    majority: bool
    """Whether more than half of the devices that repeat gave the same result; without, nobody can
    say who is right, and they are compared with the first of the most frequent results."""

    @property
    def identical(self) -> bool:
        """Whether every run on every device gave the same bits."""
        return all(device.repeats and device.agrees for device in self.devices)

    @property
    def verdict(self) -> str:
        """What was found, in a sentence."""
        runs, many = f"{self.runs} runs" if self.runs > 1 else "one run", len(self.devices)
        if self.identical:
            where = "one device" if many == 1 else f"each of {many} devices"
            return f"identical: {runs} on {where} gave the same bits"
        parts = []
        odd = [device.device for device in self.devices if not device.repeats]
        if odd:
            where = "any device" if len(odd) == many > 1 else ", ".join(odd)
            parts.append(f"{runs} on the same inputs do not repeat on {where}")
        # A device that does not repeat has nothing of its own that could agree.
        steady = [device for device in self.devices if device.repeats]
        strange = [device.device for device in steady if not device.agrees]
        if strange and self.majority:
            agree = "does not agree" if len(strange) == 1 else "do not agree"
            parts.append(
                f"{', '.join(strange)} {agree} with the other {len(steady) - len(strange)}"
            )
        elif strange:
            parts.append(f"the {len(steady)} devices disagree, and no result has a majority")
        return f"different: {'; '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"identical": self.identical, "verdict": self.verdict, **asdict(self)}


def run_on(function: Callable[..., Any], inputs: tuple[Any, ...], device: jax.Device) -> Any:
    """Run a compiled function with its inputs, and whatever it makes itself, on one device."""
    with jax.default_device(device):
        return function(*jax.device_put(inputs, device))


def repeat(
    function: Callable[..., Any],
    inputs: Sequence[Any] = (),
    *,
    devices: Sequence[jax.Device] | None = None,
    runs: int = 3,
    run: Run = run_on,
) -> Repeated:
    """Run a function several times on each device, and compare the bits of what it returns.

    Args:
        function: pure, or so one hopes; it is compiled here.
        inputs: its arguments.
        devices: all local ones, if None.
        runs: how often on each.
        run: how to run it once; for a device that is not of this process.
    """
    chosen = list(jax.local_devices() if devices is None else devices)
    if runs < 1 or not chosen:
        raise Mistake(f"repeat: {runs} runs on {len(chosen)} devices are none; use 1 or more")
    if runs * len(chosen) < 2:
        raise Mistake("repeat: one run on one device has nothing to compare with; use 2 runs")
    _check_inputs(inputs)
    compiled = jax.jit(function)
    seen: dict[str, _Outputs] = {}
    marks: dict[str, list[str]] = {}
    for device in chosen:
        told = marks.setdefault(f"{device.platform}:{device.id}", [])
        for _ in range(runs):
            try:
                outputs = _Outputs.of(run(compiled, tuple(inputs), device))
            except Exception as wrong:  # whatever the user's code raises
                said = (str(wrong).splitlines() or [""])[0]
                raise Mistake(
                    f"repeat: the function cannot be run: {type(wrong).__name__}: {said}"
                ) from wrong
            if not outputs.leaves:
                raise Mistake("repeat: the function returns no array: there is nothing to compare")
            mark = outputs.mark()
            seen.setdefault(mark, outputs)
            told.append(mark)
    steady = [told[0] for told in marks.values() if len(set(told)) == 1]
    votes = steady or [_most_frequent(told) for told in marks.values()]
    right = _most_frequent(votes)
    return Repeated(
        runs=runs,
        devices=tuple(_judge(device, marks[device], right, seen) for device in marks),
        majority=2 * votes.count(right) > len(votes),
    )


def _check_inputs(inputs: Sequence[Any]) -> None:
    numbers = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tuple(inputs))[0]:
        if not isinstance(leaf, numbers):
            at = jax.tree_util.keystr(path)
            raise Mistake(f"repeat: inputs{at} is {leaf!r}, no array; close the function over it")


def _judge(device: str, marks: list[str], right: str, seen: dict[str, _Outputs]) -> DeviceRuns:
    own = _most_frequent(marks)
    odd = tuple(number for number, mark in enumerate(marks) if mark != own)
    return DeviceRuns(
        device=device,
        repeats=not odd,
        odd_runs=odd,
        agrees=own == right,
        among_runs=seen[own].differences(seen[marks[odd[0]]]) if odd else (),
        from_others=seen[right].differences(seen[own]),
    )


def _most_frequent(marks: list[str]) -> str:
    """Of several as frequent, the one that came first."""
    return Counter(marks).most_common(1)[0][0]


@dataclass(frozen=True)
class _Outputs:
    """What a run returned, on the host."""

    leaves: tuple[tuple[str, np.ndarray], ...]

    @staticmethod
    def of(outputs: Any) -> _Outputs:
        paths, _ = jax.tree_util.tree_flatten_with_path(outputs)
        return _Outputs(
            tuple(
                (jax.tree_util.keystr(path, simple=True, separator="."), _on_host(leaf))
                for path, leaf in paths
            )
        )

    def mark(self) -> str:
        """Equal for equal bits."""
        digest = hashlib.sha256()
        for path, leaf in self.leaves:
            digest.update(f"{path} {leaf.dtype} {leaf.shape} ".encode())
            digest.update(leaf.tobytes())
        return digest.hexdigest()

    def differences(self, other: _Outputs) -> tuple[LeafDifference, ...]:
        """Leaf by leaf; both are of the same function, and so of the same structure."""
        both = zip(self.leaves, other.leaves, strict=True)
        found = (_difference(path, ours, theirs) for (path, ours), (_, theirs) in both)
        return tuple(each for each in found if each is not None)


def _on_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _difference(path: str, ours: np.ndarray, theirs: np.ndarray) -> LeafDifference | None:
    if not ours.size:
        return None
    differs = (_octets(ours) != _octets(theirs)).any(axis=-1)
    if not differs.any():
        return None
    return LeafDifference(
        leaf=path,
        elements=int(differs.sum()),
        size=ours.size,
        first=tuple(int(at) for at in np.argwhere(differs)[0]),
        ulps=_ulps(ours[differs], theirs[differs]),
    )


def _octets(leaf: np.ndarray) -> np.ndarray:
    """The bits of each element, along a new last axis."""
    return np.frombuffer(leaf.tobytes(), np.uint8).reshape(*leaf.shape, leaf.dtype.itemsize)


def _ulps(ours: np.ndarray, theirs: np.ndarray) -> int | None:
    """The largest distance between two elements, counted in numbers of their type."""
    if np.iscomplexobj(ours):
        ours, theirs = (np.stack([each.real, each.imag]) for each in (ours, theirs))
    # A NaN is not equal to itself, and NumPy warns of those that signal.
    with np.errstate(invalid="ignore"):
        known = (ours == ours) & (theirs == theirs)
    if not known.any():
        return None
    a, b = _counted(ours[known]), _counted(theirs[known])
    # Unsigned, as the distance between two of 64 bits has no room for a sign.
    return int((np.maximum(a, b) - np.minimum(a, b)).max())


def _counted(x: np.ndarray) -> np.ndarray:
    """Integers, one apart where the elements are neighbours; 0.0 and -0.0 are neighbours, too."""
    top = np.uint64(1) << np.uint64(8 * x.dtype.itemsize - 1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint64)
        return np.where(bits & top, (top - np.uint64(1)) - (bits ^ top), bits | top)
    if x.dtype == np.uint64:
        return x
    counted: np.ndarray = x.astype(np.int64).view(np.uint64) ^ (np.uint64(1) << np.uint64(63))
    return counted
