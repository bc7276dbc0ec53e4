"""One computation by several implementations: JAX or PyTorch, each under its settings.

Each takes NumPy arrays and returns NumPy arrays, so that all get the same numbers and can be
compared; `seconds` leaves both on the device and measures the time.
"""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from drumline.numerics.errors import Numbers
from drumline.numerics.mistakes import Mistake

JaxPrecision = Literal["default", "high", "highest"]
TorchPrecision = Literal["medium", "high", "highest"]
ENOUGH = 0.2
"""Seconds after which a time is known well enough, if there were `LEAST` runs."""
LEAST, MOST = 5, 200


def has_torch() -> bool:
    """Whether PyTorch can be imported, which is more than that it is there."""
    try:
        import torch  # noqa: F401
    except ImportError:
        return False
    return True


def need_torch() -> Any:
    """PyTorch, or a sentence."""
    if not has_torch():
        raise Mistake("PyTorch is not installed, and this needs it: pip install 'drumline[torch]'")
    import torch

    return torch


class Implementation(Protocol):
    """A function as one library computes it."""

    def __call__(self, *inputs: Numbers) -> Any:
        """The results, as NumPy arrays in whatever the function puts them."""
        ...

    def seconds(self, *inputs: Numbers) -> float:
        """The median time of a run on the device, when everything is compiled and in place."""
        ...


@dataclass(frozen=True)
class UnderJax:
    """A function of arrays, compiled by `jax.jit`.

    Attributes:
        function: of JAX's arrays.
        precision: of its products; "default" is whatever the device has for it.
        options: the compiler's, such as `{"xla_allow_excess_precision": False}`.
    """

    function: Callable[..., Any]
    precision: JaxPrecision = "default"
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    def __call__(self, *inputs: Numbers) -> Any:
        """As `Implementation` has it."""
        import jax

        with self._settings():
            return jax.tree.map(np.asarray, self._compiled()(*inputs))

    def seconds(self, *inputs: Numbers) -> float:
        """As `Implementation` has it."""
        import jax

        there = [jax.device_put(x) for x in inputs]
        with self._settings():
            compiled = self._compiled()
            return _median(lambda: jax.block_until_ready(compiled(*there)))

    def _compiled(self) -> Any:
        import jax

        return jax.jit(self.function, compiler_options=self.options or None)

    def _settings(self) -> Any:
        import jax

        if self.precision == "default":
            return nullcontext()
        return jax.default_matmul_precision(self.precision)


@dataclass(frozen=True)
class UnderTorch:
    """A function of tensors.

    Attributes:
        function: of PyTorch's tensors.
        precision: as `torch.set_float32_matmul_precision` takes it; None leaves it as it is.
        device: where to run; the GPU if there is one, if None.
    """

    function: Callable[..., Any]
    precision: TorchPrecision | None = None
    device: str | None = None

    def __call__(self, *inputs: Numbers) -> Any:
        """As `Implementation` has it."""
        with self._settings() as device:
            return from_torch(self.function(*self._there(inputs, device)))

    def seconds(self, *inputs: Numbers) -> float:
        """As `Implementation` has it."""
        import torch

        with self._settings() as device:
            there = self._there(inputs, device)

            def run() -> None:
                self.function(*there)
                if device != "cpu":
                    torch.cuda.synchronize()

            return _median(run)

    def _there(self, inputs: Sequence[Numbers], device: str) -> list[Any]:
        return [as_tensor(x).to(device) for x in inputs]

    @contextmanager
    def _settings(self) -> Iterator[str]:
        torch = need_torch()
        device = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        before = torch.get_float32_matmul_precision()
        try:
            if self.precision is not None:
                torch.set_float32_matmul_precision(self.precision)
            with torch.no_grad():
                yield device
        finally:
            torch.set_float32_matmul_precision(before)


def as_tensor(x: Numbers) -> Any:
    """An array as PyTorch has it, also in bfloat16, which it does not take from NumPy."""
    import torch

    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.astype(np.float32)).bfloat16()
    return torch.from_numpy(np.ascontiguousarray(x))


def from_torch(value: Any) -> Any:
    """Tensors, in whatever they are, as NumPy's arrays; all else as it is taken for one."""
    if isinstance(value, dict):
        return {name: from_torch(part) for name, part in value.items()}
    if isinstance(value, tuple | list):
        return tuple(from_torch(part) for part in value)
    if not hasattr(value, "detach"):
        return np.asarray(value)
    plain = value.detach().cpu()
    if str(plain.dtype) == "torch.bfloat16":
        import ml_dtypes

        return plain.float().numpy().astype(ml_dtypes.bfloat16)  # the same numbers
    return plain.numpy()


def _median(run: Callable[[], Any]) -> float:
    run()  # compiles, and fills caches
    times: list[float] = []
    while len(times) < LEAST or (sum(times) < ENOUGH and len(times) < MOST):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
