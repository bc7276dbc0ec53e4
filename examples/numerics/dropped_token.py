"""A sampler that drops its most probable token because the compiler skips one of two roundings.

    drumline numerics precision examples/numerics/dropped_token.py:sample --argmax

What to see: on a CPU, 27 of 64 decisions flip. Their winners led by up to 14.2, with a median of
2.25. All values agree up to the line of `kept`, where the logits become float32, because the
compiler skipped the rounding to bfloat16 in the line of the logits. The other side of the
comparison passed through `top_k` and is rounded. If that rounding went up, the best token of a
block is below its own rounded value and is dropped. The barrier in front of `top_k` makes every
version of the compiler round this side; without it, recent ones skip both roundings.

    python examples/numerics/dropped_token.py

What to see: as compiled, 26 of 64 rows lose their most probable token, and one more takes another
token of equal probability. No row loses its token with the compiler option, with an explicit
rounding, or with a threshold from the same float32 numbers as the logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, WIDTH, VOCABULARY, BLOCKS = 64, 64, 2048, 16
TEMPERATURE = 0.7

Sampled = dict[str, jax.Array]


def inputs() -> tuple[jax.Array, jax.Array]:
    """Return the last hidden state of each row, and the output matrix.

    All numbers are eighths, so their products have the same sum in any order, on any machine.
    """
    random = np.random.default_rng(0)
    states = random.integers(-16, 17, (ROWS, WIDTH)) / 8
    head = random.integers(-16, 17, (WIDTH, VOCABULARY)) / 8
    return jnp.asarray(states, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)


def sample(states: jax.Array, head: jax.Array) -> Sampled:
    """Return the token of each row: the best of the block maxima of the vocabulary."""
    logits = (states @ head).reshape(ROWS, BLOCKS, -1) / TEMPERATURE
    block_maxima = lax.top_k(lax.optimization_barrier(logits), 1)[0]
    kept = logits.astype(jnp.float32) >= block_maxima.astype(jnp.float32)
    return greedy(jnp.where(kept, logits, -jnp.inf))


def sample_rounded(states: jax.Array, head: jax.Array) -> Sampled:
    """Return the same with a rounding that no flag allows the compiler to skip."""
    logits = (states @ head).reshape(ROWS, BLOCKS, -1) / TEMPERATURE
    block_maxima = lax.top_k(lax.optimization_barrier(logits), 1)[0]
    logits32 = lax.reduce_precision(logits.astype(jnp.float32), exponent_bits=8, mantissa_bits=7)
    return greedy(jnp.where(logits32 >= block_maxima.astype(jnp.float32), logits, -jnp.inf))


def sample_in_float32(states: jax.Array, head: jax.Array) -> Sampled:
    """Return the same with both sides of the comparison from the same float32 numbers."""
    logits = (states @ head).reshape(ROWS, BLOCKS, -1) / TEMPERATURE
    logits32 = logits.astype(jnp.float32)
    return greedy(jnp.where(logits32 >= lax.top_k(logits32, 1)[0], logits, -jnp.inf))


def greedy(candidates: jax.Array) -> Sampled:
    """Return the best candidate of each row, and the scores."""
    scores = candidates.reshape(ROWS, VOCABULARY)
    return {"scores": scores, "token": jnp.argmax(scores, axis=-1)}


def dropped_count(sampled: Sampled, states: jax.Array, head: jax.Array) -> int:
    """Return the number of tokens that are less probable than another, computed without jit."""
    logits = (states @ head) / TEMPERATURE
    token_logits = jnp.take_along_axis(logits, sampled["token"][:, None], axis=-1)[:, 0]
    return int((token_logits < logits.max(axis=-1)).sum())


def main() -> None:
    """Count the rows that lose their token, as compiled and with three repairs."""
    arguments = inputs()
    strict = {"xla_allow_excess_precision": False}
    variants = {
        "as compiled": jax.jit(sample),
        "without excess precision": jax.jit(sample, compiler_options=strict),
        "rounded again by lax.reduce_precision": jax.jit(sample_rounded),
        "threshold from the same float32 numbers": jax.jit(sample_in_float32),
    }
    for name, function in variants.items():
        lost_count = dropped_count(function(*arguments), *arguments)
        print(f"{name}: {lost_count} of {ROWS} rows lose their most probable token")


if __name__ == "__main__":
    main()
