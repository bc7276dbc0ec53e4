"""A training step as a jitted function, and the loss that it differentiates.

`trace_loss` traces a model's loss before anything runs and raises UserError if it does not return a
loss. `make_step` compiles loss, gradients and update into a program, which also returns a vector of
scalars: the stop flag, the metrics, and flags for non-finite values.
"""

# mypy: allow-untyped-calls

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, Mesh

from drumline.errors import UserError
from drumline.parallel.target import overlap_options
from drumline.train.recipe import Batch, Metrics, Model, Params, Recipe
from drumline.train.state import State, path_name, replicated, shardings

# The loss -----------------------------------------------------------------------------------------

Loss = Callable[[Params, Batch, jax.Array | None], tuple[jax.Array, Metrics]]


@dataclass(frozen=True)
class TracedLoss:
    """A loss, traced for the shapes of a run."""

    jaxpr: ClosedJaxpr
    metric_names: tuple[str, ...]
    """The names of its metrics, sorted."""
    uses_key: bool
    """True if its value depends on the random key, as with dropout."""


def loss_with_metrics(model: Model) -> Loss:
    """Return the model's loss as a function that always returns a pair of loss and metrics."""

    def loss(params: Params, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Metrics]:
        output: Any = model.loss(params, batch, key)
        return output if isinstance(output, tuple) else (output, {})

    return loss


def trace_loss(model: Model, params: Params, batch: Batch) -> TracedLoss:
    """Trace a loss on shapes. Raises UserError if it returns anything but a loss and metrics."""
    key = jax.random.key(0)
    signature = inspect.signature(model.loss)
    try:
        signature.bind(params, batch, key)
    except TypeError:
        raise UserError(
            f"loss: it takes ({', '.join(signature.parameters)}) but is called with (params, "
            "batch, key); a model without randomness ignores the key"
        ) from None
    jaxpr, output = jax.make_jaxpr(loss_with_metrics(model), return_shape=True)(params, batch, key)
    if len(output) != 2 or not isinstance(output[1], Mapping):
        raise UserError(
            "loss: it returns neither the loss alone nor (loss, metrics) with a dict of metrics"
        )
    loss, metrics = output
    if not isinstance(loss, jax.ShapeDtypeStruct) or not jnp.issubdtype(loss.dtype, jnp.floating):
        raise UserError("loss: it is not a floating-point number; return the mean over the batch")
    if loss.shape:
        raise UserError(f"loss: it has shape {loss.shape}; return one number, the mean of them")
    for name, metric in metrics.items():
        if getattr(metric, "shape", None) != ():
            raise UserError(
                f"loss: metric {name!r} is not one number; in training a metric is the mean over "
                "the batch"
            )
    key_input = jaxpr.jaxpr.invars[-1]
    operands = [atom for equation in jaxpr.jaxpr.eqns for atom in equation.invars]
    uses_key = any(atom is key_input for atom in operands)
    return TracedLoss(jaxpr, tuple(sorted(metrics)), uses_key)


def has_primitive(jaxpr: Jaxpr, *names: str) -> bool:
    """Return True if the program, or a program within it, has one of these primitives."""
    return any(
        equation.primitive.name in names
        or any(
            has_primitive(inner, *names)
            for value in equation.params.values()
            for inner in _inner(value)
        )
        for equation in jaxpr.eqns
    )


def _inner(value: Any) -> Iterator[Jaxpr]:
    """Yield the programs in a parameter of an equation: loop bodies, branches, calls."""
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _inner(item)


# Parameter groups ---------------------------------------------------------------------------------


def group_names(params: Params) -> tuple[str, ...]:
    """Return the names of the parameter groups, in the order of `squared_norms`."""
    paths = jax.tree_util.tree_flatten_with_path(params)[0]
    return tuple(dict.fromkeys(_group_name(path) for path, _ in paths))


def squared_norms(grads: Params) -> dict[str, jax.Array]:
    """Return the squared norm of the gradient of each parameter group.

    A single pass over the gradients gives both their norm and the finite flags. A group whose sum
    overflows counts as non-finite, because no optimizer can use such a gradient.
    """
    sums: dict[str, jax.Array] = {}
    for path, grad in jax.tree_util.tree_flatten_with_path(grads)[0]:
        group = _group_name(path)
        square = jnp.sum(jnp.square(jnp.abs(grad.astype(jnp.float32))))
        sums[group] = sums[group] + square if group in sums else square
    return sums


def _group_name(path: tuple[Any, ...]) -> str:
    """Return the parameter group of a leaf, which is the first part of its path."""
    return path_name(path[:1]) or "params"


def _norm(tree: Any) -> jax.Array:
    return jnp.sqrt(sum(squared_norms(tree).values()))


def learning_rates(opt_state: Any) -> dict[str, jax.Array]:
    """Return the learning rate in an optimizer's state, if `optax.inject_hyperparams` keeps it."""
    found = optax.tree_utils.tree_get_all_with_path(opt_state, "learning_rate")
    # A schedule has a state of this name, too.
    rates = [rate for _, rate in found if getattr(rate, "shape", None) == ()]
    return {"learning_rate": rates[0]} if rates else {}


# The scalars of a step ----------------------------------------------------------------------------

STOP, FINITE, IN_LIMITS, LOSS = 0, 1, 2, 3
"""Indices into the scalars of a step: the stop flag, whether loss and gradients are finite, whether
they are within the limits, and the loss. The norms of gradient, parameters and update follow, the
learning rate, the model's metrics and a finite flag for each parameter group. From `LOSS` on they
depend only on state, batch and key."""


@dataclass(frozen=True)
class StepOutcome:
    """The scalars of a step, by name. All hosts read the same values."""

    scalars: np.ndarray
    metric_names: tuple[str, ...]
    group_names: tuple[str, ...]

    @property
    def stop(self) -> bool:
        """True if a host was asked to stop."""
        return bool(self.scalars[STOP])

    @property
    def finite(self) -> bool:
        """True if loss and gradients are finite."""
        return bool(self.scalars[FINITE])

    @property
    def spiked(self) -> bool:
        """True if loss or gradient norm are finite but above their limits."""
        return self.finite and not self.scalars[IN_LIMITS]

    @property
    def metrics(self) -> dict[str, float]:
        """The loss, the norms, the learning rate and the model's metrics."""
        values = self.scalars[LOSS : LOSS + len(self.metric_names)]
        return dict(zip(self.metric_names, values.tolist(), strict=True))

    @property
    def nonfinite_groups(self) -> tuple[str, ...]:
        """The parameter groups with a non-finite gradient."""
        flags = self.scalars[LOSS + len(self.metric_names) :]
        return tuple(g for g, finite in zip(self.group_names, flags, strict=True) if not finite)


# The step -----------------------------------------------------------------------------------------

HALT, HALTED, SKIP = 0, 1, 2
"""The mode of a step, which is both an input and an output. In mode HALT a non-finite value halts
the run: the mode becomes HALTED, in which steps change nothing, so the host still finds the state
that failed. In mode SKIP a step with a non-finite value is skipped. A spike halts the run in both
modes."""
NO_LIMITS = np.full(2, np.inf, np.float32)
"""The limits of loss and gradient norm in a step that is not checked for spikes."""

Options = Mapping[str, bool | str | float]
"""Compiler options by name."""
NO_OPTIONS: Options = MappingProxyType({})


def make_step(
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    state_shapes: State,
    options: Options = NO_OPTIONS,
) -> Any:
    """Return the jitted step: (state, mode, batch, stop flag, limits) → (state, mode, scalars).

    A step with a non-finite loss or gradient leaves the parameters and the optimizer's state
    unchanged. The mode (`HALT` or `SKIP`) is an input, so that the same program serves both with
    the same bits. So are the limits of loss and gradient norm: they only choose between the old and
    the new state. With an `AbstractMesh` the step can be compiled but not run. `options` are the
    compiler options.
    """
    loss_function, optimizer = loss_with_metrics(recipe.model), recipe.optimizer

    def step(
        state: State, mode: jax.Array, batch: Batch, stop_flag: jax.Array, limits: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        loss_and_grad = jax.value_and_grad(loss_function, has_aux=True)
        (loss, metrics), grads = loss_and_grad(state.params, batch, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        group_norms = jnp.stack(list(squared_norms(grads).values()))
        finite = jnp.isfinite(loss) & jnp.isfinite(group_norms).all()
        norm = jnp.sqrt(group_norms.sum())
        in_limits = finite & (loss <= limits[0]) & (norm <= limits[1])
        accept = in_limits & (mode != HALTED)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(accept, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        halts = jnp.where(mode == HALT, ~in_limits, finite & ~in_limits)
        mode = jnp.where(halts, HALTED, mode).astype(mode.dtype)
        next_step = state.step + (mode != HALTED).astype(state.step.dtype)
        values = [
            stop_flag.max(),
            finite,
            in_limits,
            loss,
            norm,
            _norm(state.params),
            _norm(updates),
            *learning_rates(opt_state).values(),
            *(metrics[name] for name in sorted(metrics)),
            *jnp.isfinite(group_norms),
        ]
        scalars = jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
        return State(params, opt_state, next_step, state.key), mode, scalars

    everywhere = replicated(mesh)
    return jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=(shardings(state_shapes), everywhere, everywhere),
        compiler_options=dict(options) or None,
    )


def compiler_options(
    recipe: Recipe, mesh: Mesh, loss: TracedLoss | None = None
) -> dict[str, bool | str | float]:
    """Return the compiler options of a step: the defaults, changed by those of the recipe.

    The models of `drumline.models` have defaults for GPUs. On TPUs, a loss with permutes, as those
    of rings, has options that overlap them.
    """
    platform = mesh.devices.flat[0].platform
    options: dict[str, Any] = dict(getattr(recipe.model, "compiler_options", {}).get(platform, {}))
    if loss is not None and has_primitive(loss.jaxpr.jaxpr, "ppermute"):
        options |= overlap_options(mesh)
    options |= recipe.compiler_options
    return {name: value for name, value in options.items() if value is not None}
