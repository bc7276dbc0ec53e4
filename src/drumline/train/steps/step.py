"""One training step under jit: loss, gradients, update, and a vector of what there is to tell."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax.sharding import AbstractMesh, Mesh

from drumline.parallel.target import overlap_options
from drumline.train.recipe import Batch, Recipe
from drumline.train.state import State, on_all, shardings
from drumline.train.steps.finite import squares
from drumline.train.steps.loss import loss_of

STOP, FINITE, CALM, LOSS = 0, 1, 2, 3
"""Where things stand in what a step tells: whether a host was told to stop, whether all was
finite, whether it was within the limits, the loss and the norm of the gradients; then come the
model's metrics, then the groups. From `LOSS` on it depends on state, batch and key alone."""
NO_LIMITS = np.full(2, np.inf, np.float32)
"""Of the loss and of the norm of the gradients: a step that is not watched for spikes."""


@dataclass(frozen=True)
class StepOutcome:
    """What a step told, by name. All hosts read the same."""

    told: np.ndarray
    names: tuple[str, ...]
    """Its metrics, in order."""
    groups: tuple[str, ...]
    """The parameter groups, in order."""

    @property
    def stop(self) -> bool:
        """Whether a host was told to stop."""
        return bool(self.told[STOP])

    @property
    def finite(self) -> bool:
        """Whether loss and gradients are."""
        return bool(self.told[FINITE])

    @property
    def spiked(self) -> bool:
        """Whether loss or norm are numbers, but beyond the limits."""
        return self.finite and not self.told[CALM]

    @property
    def metrics(self) -> dict[str, float]:
        """The loss, the norm of the gradients, and the model's own."""
        values = self.told[LOSS : LOSS + len(self.names)]
        return dict(zip(self.names, values.tolist(), strict=True))

    @property
    def bad_groups(self) -> tuple[str, ...]:
        """The parameter groups whose gradients are not finite."""
        flags = self.told[LOSS + len(self.names) :]
        return tuple(g for g, good in zip(self.groups, flags, strict=True) if not good)


WATCHING, HALTED, PASSING = 0, 1, 2
"""What a step does about values that are not finite: halt the run, so that every step after it
changes nothing and the state is still the one that failed when the host comes to read of it; be
such a step after it; or pass over the batch and go on. A spike, beyond the limits, halts in any
case: who passes over it has lifted them."""

Options = Mapping[str, bool | str | float]
"""Of the compiler, by name."""
_OPTIONS: dict[str, Options] = {"gpu": {"xla_gpu_enable_triton_gemm": False}}
"""By platform. With cuBLAS alone a 1.3B decoder trains 5 % faster on an H200 than with the products
that XLA's tuning picks, and compiles in half the time (benchmarks/train_h200.py)."""
NO_OPTIONS: Options = MappingProxyType({})


def make_step(
    recipe: Recipe,
    mesh: Mesh | AbstractMesh,
    places: State,
    options: Options = NO_OPTIONS,
) -> Any:
    """The step: state, watch, batch, notice, limits → state, watch, what it tells.

    A step whose loss or gradients are not finite leaves parameters and moments as they were. What
    it does then is an input (`WATCHING` or `PASSING`), so that there is one program for both and
    their bits agree; so are the limits of loss and norm (`NO_LIMITS` for none), which only choose
    between two states and change the bits of neither. On an `AbstractMesh` it can be compiled and
    looked at. `options` go to the compiler, beside those of the platform.
    """
    loss_and_metrics, optimizer = loss_of(recipe.model), recipe.optimizer

    def step(
        state: State, watch: jax.Array, batch: Batch, notice: jax.Array, limits: jax.Array
    ) -> tuple[State, jax.Array, jax.Array]:
        key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)
        with_gradient = jax.value_and_grad(loss_and_metrics, has_aux=True)
        (loss, metrics), grads = with_gradient(state.params, batch, key)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)

        by_group = jnp.stack(list(squares(grads).values()))
        finite = jnp.isfinite(loss) & jnp.isfinite(by_group).all()
        norm = jnp.sqrt(by_group.sum())
        calm = finite & (loss <= limits[0]) & (norm <= limits[1])
        good = calm & (watch != HALTED)
        params, opt_state = jax.tree.map(
            lambda new, old: jnp.where(good, new, old),
            (params, opt_state),
            (state.params, state.opt_state),
        )
        halts = jnp.where(watch == WATCHING, ~calm, finite & ~calm)
        watch = jnp.where(halts, HALTED, watch).astype(watch.dtype)
        number = state.step + (watch != HALTED).astype(state.step.dtype)
        words = [
            notice.max(),
            finite,
            calm,
            loss,
            norm,
            *(metrics[name] for name in sorted(metrics)),
            *jnp.isfinite(by_group),
        ]
        told = jnp.stack([jnp.asarray(word, jnp.float32) for word in words])
        return State(params, opt_state, number, state.key), watch, told

    whole = on_all(mesh)
    return jax.jit(
        step,
        donate_argnums=(0, 1),
        out_shardings=(shardings(places), whole, whole),
        compiler_options={**options_on(mesh), **options} or None,
    )


def options_on(mesh: Mesh | AbstractMesh) -> dict[str, Any]:
    """What the compiler of a step is told; for an abstract mesh, which has no platform, nothing."""
    if not isinstance(mesh, Mesh):
        return {}
    platform = mesh.devices.flat[0].platform
    return dict(overlap_options(mesh) if platform == "tpu" else _OPTIONS.get(platform, NO_OPTIONS))
