"""Not-a-number: how a step notices, and whose rows and which parameters it came from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from drumline.train.recipe import Batch, Model, Params
from drumline.train.state import dotted
from drumline.train.steps.loss import loss_of


def squares(grads: Params) -> dict[str, jax.Array]:
    """The sum of squares of each parameter group's gradient, by the group's name.

    One pass over the gradients gives their norm and tells whether they are finite. A group whose
    sum overflows counts as not finite: no optimizer makes anything good of it.
    """
    sums: dict[str, jax.Array] = {}
    for path, grad in jax.tree_util.tree_flatten_with_path(grads)[0]:
        group = group_of(path)
        square = jnp.sum(jnp.square(jnp.abs(grad.astype(jnp.float32))))
        sums[group] = sums[group] + square if group in sums else square
    return sums


def all_finite(params: Params) -> bool:
    """Whether parameters are; this waits for the devices."""
    leaves = [leaf for leaf in jax.tree.leaves(params) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    found = jax.jit(lambda leaves: jnp.stack([jnp.isfinite(leaf).all() for leaf in leaves]).all())
    return not leaves or bool(np.asarray(found(leaves).addressable_data(0)))


def groups_of(params: Params) -> tuple[str, ...]:
    """The names of all parameter groups, in the order of `squares`."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return tuple(dict.fromkeys(group_of(path) for path, _ in paths))


def group_of(path: tuple[Any, ...]) -> str:
    """The parameter group a leaf belongs to: the first step of its place in the tree."""
    return dotted(path[:1]) or "params"


@dataclass(frozen=True)
class NanOrigin:
    """Where a value that is not finite came from."""

    host: int | None
    """The first host whose rows give one by themselves; None where none does, or all share."""
    hosts: int
    groups: tuple[str, ...]
    """Parameter groups with such gradients, in the order of the parameters."""

    def told(self, step: int, batch: str) -> str:
        """The report, in a sentence."""
        host = "on no single host" if self.host is None else f"on host {self.host} of {self.hosts}"
        group = f"in parameter group {self.groups[0]}" if self.groups else "in the loss alone"
        more = f" and {len(self.groups) - 1} more" if len(self.groups) > 1 else ""
        return f"step {step}: not a number from {batch}, first {host}, {group}{more}"


Finite = Callable[[Params, Batch, jax.Array, np.ndarray], jax.Array]
"""Parameters, batch, the step's key and an order of rows → whether all is finite."""


def make_finite(model: Model) -> Finite:
    """The function to compute a batch again with, of some of its rows."""

    def finite(params: Params, batch: Batch, key: jax.Array, order: jax.Array) -> jax.Array:
        chosen = jax.tree.map(lambda rows: rows[order], batch)
        with_gradient = jax.value_and_grad(loss_of(model), has_aux=True)
        (loss, _), grads = with_gradient(params, chosen, key)
        return jnp.isfinite(loss) & jnp.isfinite(jnp.stack(list(squares(grads).values()))).all()

    compiled: Finite = jax.jit(finite)
    return compiled


def find_host(
    finite: Callable[[np.ndarray], jax.Array], size: int, hosts: Mapping[int, np.ndarray]
) -> int | None:
    """Compute a bad batch again, of each host's rows alone. All hosts take part.

    `finite` says it of these rows of a batch of that size, `hosts` which rows each host holds.
    Returns the first host whose rows are bad by themselves.
    """

    def bad(rows: np.ndarray) -> bool:
        # Every row of the batch from these few: the shapes, and so the program, stay the same.
        return not bool(np.asarray(finite(np.resize(rows, size)).addressable_data(0)))

    apart = len({tuple(rows) for rows in hosts.values()}) == len(hosts)
    return next((host for host, rows in hosts.items() if bad(rows)), None) if apart else None
