"""Two layers learn the sign of a sum.

    python -m drumline.train train.py                      trains on this machine
    python -m drumline.train train.py --set steps=200      --help lists the other settings

`init`, `loss` and `rows` are the parts to replace by your own. A job saves a checkpoint every 100
steps, on all hosts, and continues from the newest one when its slice was preempted. `drumline show`
and `drumline plot` print the loss and the metrics that `loss` returns.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from drumline.train import Evaluation, Functions, Recipe, Settings, data

WIDTH = 16


def init(key):
    first, second = jax.random.split(key)
    return {
        "hidden": jax.random.normal(first, (WIDTH, 64)) * WIDTH**-0.5,
        "out": jax.random.normal(second, (64,)) * 64**-0.5,
    }


def loss(params, batch, key):
    hidden = jax.nn.relu(batch["x"] @ params["hidden"])
    if key is not None:  # training; an evaluation has no key, and so no dropout
        hidden = jnp.where(jax.random.bernoulli(key, 0.9, hidden.shape), hidden / 0.9, 0)
    logits = hidden @ params["out"]
    accuracy = jnp.mean((logits > 0) == (batch["y"] > 0))
    return jnp.mean(optax.sigmoid_binary_cross_entropy(logits, batch["y"])), {"accuracy": accuracy}


def rows(count, seed):
    x = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)
    return {"x": x, "y": (x.sum(axis=1) > 0).astype(np.float32)}


def recipe(*, steps: int = 1000, batch: int = 64, learning_rate: float = 1e-2) -> Recipe:
    return Recipe(
        model=Functions(init, loss),
        optimizer=optax.adam(learning_rate),
        data=data.arrays(rows(4096, seed=0), batch=batch),
        mesh={"data": -1},
        steps=steps,
        evaluation=Evaluation(data.arrays(rows(1000, seed=1), batch=batch)),
        settings=Settings(save_every=100),
    )
