"""A sampler that drops its most probable token, because one of two roundings never happens.

    drumline numerics precision examples/numerics/dropped_token.py:sample --argmax

What to see: on a CPU, 27 of 64 decisions flip, whose winner was ahead by up to 14.2 and by 2.25 at
the median. Everything agrees up to the line of `kept`, where the logits become float32: the
rounding to bfloat16 in the line of the logits never happened there. The other side of the
comparison has gone through `top_k` and is rounded. Wherever that rounding went up, the best token
of a block does not reach its own value, and is dropped.

    python examples/numerics/dropped_token.py

What to see: as compiled, 26 of 64 rows lose their most probable token; one more takes another that
is as probable. With the compiler option none does, nor where the rounding is spelled out, nor where
the threshold comes from the same float32 numbers as the logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, WIDTH, VOCABULARY, BLOCKS = 64, 64, 2048, 16
TEMPERATURE = 0.7

Sampled = dict[str, jax.Array]


def inputs() -> tuple[jax.Array, jax.Array]:
    """The last hidden state of each row, and the matrix that makes logits of it.

    Eighths: their products add up to the same sum in every order, and so on every machine.
    """
    draw = np.random.default_rng(0)
    states = draw.integers(-16, 17, (ROWS, WIDTH)) / 8
    head = draw.integers(-16, 17, (WIDTH, VOCABULARY)) / 8
    return jnp.asarray(states, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)


def sample(states: jax.Array, head: jax.Array) -> Sampled:
    """The token of each row: the best among the best of each block of the vocabulary."""
    logits = (states @ head).reshape(ROWS, BLOCKS, -1) / TEMPERATURE
    best = lax.top_k(logits, 1)[0]
    kept = logits.astype(jnp.float32) >= best.astype(jnp.float32)
    return greedy(jnp.where(kept, logits, -jnp.inf))


def sample_rounded(states: jax.Array, head: jax.Array) -> Sampled:
    """The same, with a rounding that no flag allows the compiler to leave out."""
    logits = (states @ head).reshape(ROWS, BLOCKS, -1) / TEMPERATURE
    best = lax.top_k(logits, 1)[0]
    wide = lax.reduce_precision(logits.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return greedy(jnp.where(wide >= best.astype(jnp.float32), logits, -jnp.inf))


def sample_in_float32(states: jax.Array, head: jax.Array) -> Sampled:
    """The same, with both sides of the comparison taken from the same float32 numbers."""
    logits = (states @ head).reshape(ROWS, BLOCKS, -1) / TEMPERATURE
    wide = logits.astype(jnp.float32)
    return greedy(jnp.where(wide >= lax.top_k(wide, 1)[0], logits, -jnp.inf))


def greedy(candidates: jax.Array) -> Sampled:
    """The best candidate of each row, and the scores it was chosen by."""
    scores = candidates.reshape(ROWS, VOCABULARY)
    return {"scores": scores, "token": jnp.argmax(scores, axis=-1)}


def dropped(sampled: Sampled, states: jax.Array, head: jax.Array) -> int:
    """Rows whose token is less probable than another, computed one operation at a time."""
    logits = (states @ head) / TEMPERATURE
    chosen = jnp.take_along_axis(logits, sampled["token"][:, None], axis=-1)[:, 0]
    return int((chosen < logits.max(axis=-1)).sum())


def main() -> None:
    """Count the rows that lose their token, as compiled and mended in three ways."""
    arguments = inputs()
    strict = {"xla_allow_excess_precision": False}
    mended = {
        "as compiled": jax.jit(sample),
        "without excess precision": jax.jit(sample, compiler_options=strict),
        "rounded again by lax.reduce_precision": jax.jit(sample_rounded),
        "threshold from the same float32 numbers": jax.jit(sample_in_float32),
    }
    for name, function in mended.items():
        lost = dropped(function(*arguments), *arguments)
        print(f"{name}: {lost} of {ROWS} rows lose their most probable token")


if __name__ == "__main__":
    main()
