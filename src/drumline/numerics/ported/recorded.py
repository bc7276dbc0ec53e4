"""What every module of a PyTorch model is given and returns, as it is and in float64."""

# NumPy's functions promise less than they return.
# mypy: disable-error-code="no-any-return, no-untyped-call"

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from drumline.numerics.errors import Numbers
from drumline.numerics.implementations import as_tensor
from drumline.numerics.ported.names import TorchPlace

if TYPE_CHECKING:
    import torch

OUTPUT = "output"
"""The name of what the whole model returns."""


@dataclass
class Recording:
    """One run of a model.

    Attributes:
        module: the model that ran.
        given: by module, the first tensor it was given.
        returned: by module, the first tensor it returned.
    """

    module: torch.nn.Module
    given: dict[str, torch.Tensor] = field(default_factory=dict)
    returned: dict[str, torch.Tensor] = field(default_factory=dict)

    def at(self, place: TorchPlace) -> Numbers | None:
        """The value at a place, in float64; None if there is none."""
        found = (self.given if place.given else self.returned).get(place.module)
        if found is None:
            return None
        return place.pick(found.detach().to("cpu").double().numpy())

    def dtype_at(self, place: TorchPlace) -> np.dtype[Any]:
        """The type in which PyTorch has it."""
        found = (self.given if place.given else self.returned)[place.module]
        name = str(found.dtype).removeprefix("torch.")
        return np.dtype(getattr(ml_dtypes, name, name))

    def whole(self, name: str) -> Numbers | None:
        """What a module was given, in float64."""
        found = self.given.get(name)
        return None if found is None else found.detach().to("cpu").double().numpy()

    def whole_result(self, name: str) -> Numbers:
        """What a module returned, in float64."""
        return self.returned[name].detach().to("cpu").double().numpy()

    def module_at(self, place: TorchPlace) -> torch.nn.Module | None:
        """The module whose result a place is; None if it is something between modules."""
        if place.given or place.module == OUTPUT:
            return None
        return dict(self.module.named_modules())[place.module]


def record(module: torch.nn.Module, inputs: Sequence[Any]) -> Recording:
    """Run a model once, without gradients and as for evaluation, and keep all values."""
    import torch

    recording = Recording(module)
    training = {part: part.training for part in module.modules()}
    try:
        module.eval()
        with torch.no_grad(), _hooked(recording):
            _note(recording.returned, OUTPUT, module(*_tensors(module, inputs)))
    finally:
        for part, was in training.items():
            part.training = was
    return recording


def in_float64(module: torch.nn.Module) -> torch.nn.Module:
    """A copy that computes in float64."""
    return copy.deepcopy(module).double()


def _tensors(module: torch.nn.Module, inputs: Sequence[Any]) -> Iterator[torch.Tensor]:
    """The inputs on the model's device, floats in its type."""
    import torch

    some = next(module.parameters(), torch.empty(0))
    for given in inputs:
        tensor = given if isinstance(given, torch.Tensor) else as_tensor(np.asarray(given))
        kind = some.dtype if tensor.is_floating_point() else torch.long
        yield tensor.to(device=some.device, dtype=kind)


@contextmanager
def _hooked(recording: Recording) -> Iterator[None]:
    handles = []
    for name, part in recording.module.named_modules():
        if not name:
            continue

        def keep(_: Any, given: Any, named: Any, returned: Any, name: str = name) -> None:
            _note(recording.given, name, (*given, *named.values()))
            _note(recording.returned, name, returned)

        handles.append(part.register_forward_hook(keep, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _note(kept: dict[str, torch.Tensor], name: str, values: Any) -> None:
    """Keep the first tensor, at the first call: a module that is called again is not followed."""
    import torch

    if name in kept:
        return
    found = next((value for value in _flat(values) if isinstance(value, torch.Tensor)), None)
    if found is not None:
        kept[name] = found.clone()


def _flat(values: Any) -> Iterator[Any]:
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, tuple | list):
        for value in values:
            yield from _flat(value)
    else:
        yield values
