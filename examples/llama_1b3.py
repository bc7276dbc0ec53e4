"""Train a Llama-style decoder of 1.3 billion parameters, with FSDP and tensor parallelism.

    python -m drumline.train examples/llama_1b3.py --set tokens=/data/train.bin --set model=4

Measured on one H200: see docs/training.md.

Groups of `model` devices share each matmul and pass the activations around a ring (tensor
parallelism). The groups have different rows of the batch (FSDP). The rest is as in llama_350m.py.
"""

from pathlib import Path

from llama_350m import adamw, texts

from drumline.models import llama_1b3
from drumline.models.remat import Remat
from drumline.train import Recipe, SaveEvery, Settings


def recipe(
    *,
    tokens: Path | None = None,
    model: int = 1,
    remat: Remat = True,
    steps: int = 50_000,
    batch: int = 256,
    learning_rate: float = 2e-4,
    save_every: SaveEvery = 500,
) -> Recipe:
    """Return the recipe."""
    decoder = llama_1b3(layout="fsdp+tensor", scan_layers=True, remat=remat)
    return Recipe(
        model=decoder,
        optimizer=adamw(learning_rate, steps),
        data=texts(tokens, decoder, batch),
        mesh={"data": -1, "model": model},
        steps=steps,
        settings=Settings(
            save_every=save_every, keep_every=5000 if save_every == "auto" else 10 * save_every
        ),
    )
