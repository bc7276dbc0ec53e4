"""Run a function with JAX or PyTorch, under given settings.

Implementations take NumPy arrays and return NumPy arrays, so that they get the same numbers and can
be compared. `seconds` measures the time with the arrays on the device.
"""

# NumPy annotates many results as Any.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from drumline.errors import UserError
from drumline.numerics.errors import NDArray

JaxPrecision = Literal["default", "high", "highest"]
TorchPrecision = Literal["medium", "high", "highest"]
TIMING_SECONDS = 0.2
"""The seconds after which a measurement ends, if there were `MIN_RUNS` runs."""
MIN_RUNS, MAX_RUNS = 5, 200


def has_torch() -> bool:
    """Return True if PyTorch can be imported. An installed PyTorch may fail to import."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def import_torch() -> Any:
    """Return the module `torch`, or raise UserError if it is not installed."""
    if not has_torch():
        raise UserError("PyTorch is not installed; install it with pip install 'drumline[torch]'")
    import torch

    return torch


class Implementation(Protocol):
    """A function in one library."""

    def __call__(self, *inputs: NDArray) -> Any:
        """Return the results as NumPy arrays, in the structure that the function returns."""
        ...

    def seconds(self, *inputs: NDArray) -> float:
        """Return the median time of a run on the device, without compilation and transfers."""
        ...


@dataclass(frozen=True)
class UnderJax:
    """A function of JAX arrays, compiled by `jax.jit`.

    Attributes:
        function: A function of JAX arrays.
        precision: The matmul precision; "default" is the device's default.
        options: Compiler options, such as `{"xla_allow_excess_precision": False}`.
    """

    function: Callable[..., Any]
    precision: JaxPrecision = "default"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __call__(self, *inputs: NDArray) -> Any:
        """Run the function. See `Implementation`."""
        import jax

        with self._set_precision():
            return jax.tree.map(np.asarray, self._compiled()(*inputs))

    def seconds(self, *inputs: NDArray) -> float:
        """Measure the function. See `Implementation`."""
        import jax

        arrays = [jax.device_put(x) for x in inputs]
        with self._set_precision():
            compiled = self._compiled()
            return _median_seconds(lambda: jax.block_until_ready(compiled(*arrays)))

    def _compiled(self) -> Any:
        import jax

        return jax.jit(self.function, compiler_options=self.options or None)

    def _set_precision(self) -> Any:
        import jax

        if self.precision == "default":
            return nullcontext()
        return jax.default_matmul_precision(self.precision)


@dataclass(frozen=True)
class UnderTorch:
    """A function of PyTorch tensors.

    Attributes:
        function: A function of PyTorch tensors.
        precision: The argument of `torch.set_float32_matmul_precision`; None keeps the setting.
        device: The device to run on, by default the GPU if there is one.
    """

    function: Callable[..., Any]
    precision: TorchPrecision | None = None
    device: str | None = None

    def __call__(self, *inputs: NDArray) -> Any:
        """Run the function. See `Implementation`."""
        with self._set_precision() as device:
            return to_numpy(self.function(*_to_device(inputs, device)))

    def seconds(self, *inputs: NDArray) -> float:
        """Measure the function. See `Implementation`."""
        import torch

        with self._set_precision() as device:
            tensors = _to_device(inputs, device)

            def run() -> None:
                self.function(*tensors)
                if device != "cpu":
                    torch.cuda.synchronize()

            return _median_seconds(run)

    @contextmanager
    def _set_precision(self) -> Iterator[str]:
        """Set the precision and yield the device."""
        torch = import_torch()
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        previous = torch.get_float32_matmul_precision()
        try:
            if self.precision is not None:
                torch.set_float32_matmul_precision(self.precision)
            with torch.no_grad():
                yield device
        finally:
            torch.set_float32_matmul_precision(previous)


def _to_device(inputs: Sequence[NDArray], device: str) -> list[Any]:
    return [to_tensor(x).to(device) for x in inputs]


def to_tensor(x: NDArray) -> Any:
    """Return an array as a PyTorch tensor. PyTorch itself does not take bfloat16 from NumPy."""
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(x))


def to_numpy(value: Any) -> Any:
    """Return the tensors in a structure of dicts, tuples and lists as NumPy arrays."""
    if isinstance(value, dict):
        return {name: to_numpy(item) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(to_numpy(item) for item in value)
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    if str(tensor.dtype) == "torch.bfloat16":
        import ml_dtypes

        return tensor.float().numpy().astype(ml_dtypes.bfloat16)  # exact
    return tensor.numpy()


def _median_seconds(run: Callable[[], Any]) -> float:
    run()  # compiles, and fills caches
    seconds: list[float] = []
    while len(seconds) < MIN_RUNS or (sum(seconds) < TIMING_SECONDS and len(seconds) < MAX_RUNS):
        started_at = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started_at)
    return statistics.median(seconds)
