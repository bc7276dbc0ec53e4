"""Check that a function gives the same bits in every run and on every device.

The local devices run a compiled function repeatedly on the same inputs. A device's most frequent
result is compared with the most frequent result of the devices that repeat. Differences are
reported by leaf, index and ulps. Bits are compared, so a NaN equals the same NaN, and 0.0 differs
from -0.0.
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

from drumline.errors import UserError

Run = Callable[[Callable[..., Any], tuple[Any, ...], jax.Device], Any]
"""Takes a compiled function, its inputs and a device, and returns the outputs."""


@dataclass(frozen=True)
class LeafDifference:
    """The difference between two results in a leaf."""

    leaf: str
    """The path of the leaf; empty if the function returns a single array."""
    elements: int
    """The number of elements with different bits."""
    size: int
    first: tuple[int, ...]
    """The index of the first such element in row-major order."""
    ulps: int | None
    """The maximum difference in ulps, which are 1 for integers. None if all differences involve
    NaN."""

    def __str__(self) -> str:
        """Return the difference as a noun phrase."""
        position = f"[{', '.join(map(str, self.first))}]" if self.first else ""
        size = "NaN against other bits" if self.ulps is None else f"up to {self.ulps:,} ulp"
        leaf = self.leaf or "output"
        return (
            f"{leaf}: {self.elements:,} of {self.size:,} elements, {size}, "
            f"first at {leaf}{position}"
        )


@dataclass(frozen=True)
class DeviceRuns:
    """The runs of a device."""

    device: str
    repeats: bool
    """True if all runs gave the same bits."""
    odd_runs: tuple[int, ...]
    """The indices of the runs that differ from the device's most frequent result."""
    agrees: bool
    """True if the device's most frequent result is the expected result."""
    among_runs: tuple[LeafDifference, ...]
    """The differences between the device's most frequent result and its first odd run."""
    from_others: tuple[LeafDifference, ...]
    """The differences between the expected result and the device's most frequent result."""


@dataclass(frozen=True)
class RepeatReport:
    """The runs of all devices."""

    runs: int
    devices: tuple[DeviceRuns, ...]
    majority: bool
    """True if more than half of the devices that repeat have the same result. Otherwise the correct
    result is unknown, and the first of the most frequent results is the expected result."""

    @property
    def identical(self) -> bool:
        """True if all runs on all devices have the same bits."""
        return all(device.repeats and device.agrees for device in self.devices)

    @property
    def verdict(self) -> str:
        """A sentence with the result."""
        runs = f"{self.runs} runs" if self.runs > 1 else "one run"
        device_count = len(self.devices)
        if self.identical:
            devices = "one device" if device_count == 1 else f"each of {device_count} devices"
            return f"identical: {runs} on {devices} gave the same bits"
        clauses = []
        unstable = [device.device for device in self.devices if not device.repeats]
        if unstable:
            devices = ", ".join(unstable)
            if len(unstable) == device_count > 1:
                devices = "any device"
            clauses.append(f"{runs} on the same inputs do not repeat on {devices}")
        # A device that does not repeat has no result to compare.
        stable = [device for device in self.devices if device.repeats]
        deviating = [device.device for device in stable if not device.agrees]
        if deviating and self.majority:
            verb = "does not agree" if len(deviating) == 1 else "do not agree"
            clauses.append(
                f"{', '.join(deviating)} {verb} with the other {len(stable) - len(deviating)}"
            )
        elif deviating:
            clauses.append(f"the {len(stable)} devices disagree, and no result has a majority")
        return f"different: {'; '.join(clauses)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {"identical": self.identical, "verdict": self.verdict, **asdict(self)}


def run_on(function: Callable[..., Any], inputs: tuple[Any, ...], device: jax.Device) -> Any:
    """Run a compiled function on a device, including the arrays that it creates."""
    with jax.default_device(device):
        return function(*jax.device_put(inputs, device))


def repeat(
    function: Callable[..., Any],
    inputs: Sequence[Any] = (),
    *,
    devices: Sequence[jax.Device] | None = None,
    runs: int = 3,
    run: Run = run_on,
) -> RepeatReport:
    """Run a function repeatedly on all devices and compare the bits of its results.

    Args:
        function: A pure function, which is compiled here.
        inputs: The arguments.
        devices: The devices, by default the local devices.
        runs: The number of runs per device.
        run: Runs the compiled function once, for devices of other processes.
    """
    chosen = list(jax.local_devices() if devices is None else devices)
    if runs < 1 or not chosen:
        raise UserError(f"repeat: there are {runs} runs on {len(chosen)} devices; use 1 or more")
    if runs * len(chosen) < 2:
        raise UserError("repeat: one run on one device has nothing to compare with; use 2 runs")
    _check_inputs(inputs)
    compiled = jax.jit(function)
    results: dict[str, _Outputs] = {}
    hashes: dict[str, list[str]] = {}
    for device in chosen:
        device_hashes = hashes.setdefault(f"{device.platform}:{device.id}", [])
        for _ in range(runs):
            try:
                outputs = _Outputs.from_tree(run(compiled, tuple(inputs), device))
            except Exception as error:  # the user's code may raise anything
                first_line = (str(error).splitlines() or [""])[0]
                raise UserError(
                    f"repeat: the function cannot be run: {type(error).__name__}: {first_line}"
                ) from error
            if not outputs.leaves:
                raise UserError(
                    "repeat: the function returns no array, so there is nothing to compare"
                )
            output_hash = outputs.hash()
            results.setdefault(output_hash, outputs)
            device_hashes.append(output_hash)
    stable = [values[0] for values in hashes.values() if len(set(values)) == 1]
    votes = stable or [_most_frequent(values) for values in hashes.values()]
    expected = _most_frequent(votes)
    return RepeatReport(
        runs=runs,
        devices=tuple(
            _compare_device(device, hashes[device], expected, results) for device in hashes
        ),
        majority=2 * votes.count(expected) > len(votes),
    )


def _check_inputs(inputs: Sequence[Any]) -> None:
    array_types = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)
    for path, leaf in jax.tree_util.tree_flatten_with_path(tuple(inputs))[0]:
        if not isinstance(leaf, array_types):
            name = f"inputs{jax.tree_util.keystr(path)}"
            raise UserError(f"repeat: {name} is {leaf!r}, no array; close the function over it")


def _compare_device(
    device: str, hashes: list[str], expected: str, results: dict[str, _Outputs]
) -> DeviceRuns:
    usual_hash = _most_frequent(hashes)
    odd_runs = tuple(index for index, output_hash in enumerate(hashes) if output_hash != usual_hash)
    return DeviceRuns(
        device=device,
        repeats=not odd_runs,
        odd_runs=odd_runs,
        agrees=usual_hash == expected,
        among_runs=results[usual_hash].differences(results[hashes[odd_runs[0]]])
        if odd_runs
        else (),
        from_others=results[expected].differences(results[usual_hash]),
    )


def _most_frequent(hashes: list[str]) -> str:
    """Return the most frequent hash, or the first of equally frequent hashes."""
    return Counter(hashes).most_common(1)[0][0]


@dataclass(frozen=True)
class _Outputs:
    """The results of a run, on the host."""

    leaves: tuple[tuple[str, np.ndarray], ...]

    @staticmethod
    def from_tree(outputs: Any) -> _Outputs:
        paths, _ = jax.tree_util.tree_flatten_with_path(outputs)
        return _Outputs(
            tuple(
                (jax.tree_util.keystr(path, simple=True, separator="."), _to_host(leaf))
                for path, leaf in paths
            )
        )

    def hash(self) -> str:
        digest = hashlib.sha256()
        for path, leaf in self.leaves:
            digest.update(f"{path} {leaf.dtype} {leaf.shape} ".encode())
            digest.update(leaf.tobytes())
        return digest.hexdigest()

    def differences(self, other: _Outputs) -> tuple[LeafDifference, ...]:
        """Compare two results of a function by leaf."""
        pairs = zip(self.leaves, other.leaves, strict=True)
        differences = (_compare_leaf(path, a, b) for (path, a), (_, b) in pairs)
        return tuple(difference for difference in differences if difference is not None)


def _to_host(leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.asarray(leaf)


def _compare_leaf(path: str, a: np.ndarray, b: np.ndarray) -> LeafDifference | None:
    if not a.size:
        return None
    differs = (_as_bytes(a) != _as_bytes(b)).any(axis=-1)
    if not differs.any():
        return None
    return LeafDifference(
        leaf=path,
        elements=int(differs.sum()),
        size=a.size,
        first=tuple(int(index) for index in np.argwhere(differs)[0]),
        ulps=_max_ulps(a[differs], b[differs]),
    )


def _as_bytes(leaf: np.ndarray) -> np.ndarray:
    """Return the bytes of the elements along a new last axis."""
    return np.frombuffer(leaf.tobytes(), np.uint8).reshape(*leaf.shape, leaf.dtype.itemsize)


def _max_ulps(a: np.ndarray, b: np.ndarray) -> int | None:
    """Return the maximum distance of two elements in ulps, or None if all pairs have NaN."""
    if np.iscomplexobj(a):
        a, b = (np.stack([x.real, x.imag]) for x in (a, b))
    # Only a NaN differs from itself. NumPy warns about signaling NaNs.
    with np.errstate(invalid="ignore"):
        not_nan = (a == a) & (b == b)
    if not not_nan.any():
        return None
    a, b = _to_ordered_integers(a[not_nan]), _to_ordered_integers(b[not_nan])
    # Differences of 64-bit integers need an unsigned type.
    return int((np.maximum(a, b) - np.minimum(a, b)).max())


def _to_ordered_integers(x: np.ndarray) -> np.ndarray:
    """Map numbers to integers in the same order. Neighbours, also 0.0 and -0.0, differ by 1."""
    sign_bit = np.uint64(1) << np.uint64(8 * x.dtype.itemsize - 1)
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = x.view(f"uint{8 * x.dtype.itemsize}").astype(np.uint64)
        negative = (sign_bit - np.uint64(1)) - (bits ^ sign_bit)
        return np.where(bits & sign_bit, negative, bits | sign_bit)
    if x.dtype == np.uint64:
        return x
    ordered: np.ndarray = x.astype(np.int64).view(np.uint64) ^ (np.uint64(1) << np.uint64(63))
    return ordered
