"""A model's loss, traced before anything runs: what it tells, and whether it draws at random.

`loss` may return the loss alone or the loss and metrics. What it cannot return is told in a
sentence, here, and not by whatever fails first.
"""

# mypy: allow-untyped-calls

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from drumline.train.mistakes import Mistake
from drumline.train.recipe import Batch, Metrics, Model, Params

_CALLBACKS = ("pure_callback", "io_callback")

Loss = Callable[[Params, Batch, jax.Array | None], tuple[jax.Array, Metrics]]


@dataclass(frozen=True)
class TracedLoss:
    """What is known of a loss for given shapes."""

    traced: ClosedJaxpr
    metrics: tuple[str, ...]
    """Their names, sorted."""
    draws: bool
    """Whether its value depends on the key: dropout, noise."""


def loss_of(model: Model) -> Loss:
    """The model's loss and metrics, which are none where it returns the loss alone."""

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        told: Any = model.loss(params, batch, key)
        return told if isinstance(told, tuple) else (told, {})

    return loss


def trace_loss(model: Model, params: Params, batch: Batch) -> TracedLoss:
    """Trace a loss on shapes; raises Mistake where it is none."""
    key = jax.random.key(0)
    takes = inspect.signature(model.loss)
    try:
        takes.bind(params, batch, key)
    except TypeError:
        raise Mistake(
            f"loss: it takes ({', '.join(takes.parameters)}) and is called with (params, batch, "
            "key); a model without randomness leaves the key alone"
        ) from None
    traced, shapes = jax.make_jaxpr(loss_of(model), return_shape=True)(params, batch, key)
    if len(shapes) != 2 or not isinstance(shapes[1], Mapping):
        raise Mistake(
            "loss: it returns neither the loss alone nor (loss, metrics), metrics a dict of names"
        )
    loss, metrics = shapes
    if not isinstance(loss, jax.ShapeDtypeStruct) or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise Mistake("loss: it is no floating-point number; return the mean over the batch")
    if loss.shape:
        raise Mistake(f"loss: it has shape {loss.shape}; return one number, the mean of them")
    for name, metric in metrics.items():
        if getattr(metric, "shape", None) != ():
            raise Mistake(
                f"loss: metric {name!r} is not one number; in training a metric is the mean over "
                "the batch"
            )
    drawn = traced.jaxpr.invars[-1]
    uses = [atom for equation in traced.jaxpr.eqns for atom in equation.invars]
    return TracedLoss(traced, tuple(sorted(metrics)), any(atom is drawn for atom in uses))


def calls_back(jaxpr: Jaxpr) -> bool:
    """Whether values in it come from Python while it runs: they need not be the same each time."""
    return any(
        equation.primitive.name in _CALLBACKS
        or any(calls_back(inner) for value in equation.params.values() for inner in _within(value))
        for equation in jaxpr.eqns
    )


def _within(value: Any) -> Iterator[Jaxpr]:
    """The programs within a parameter of an equation: bodies of loops, branches, calls."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _within(item)
