"""Models small enough to read and fast enough to use: an MLP, a Vision Transformer, a decoder.

Each is one file and one frozen dataclass of sizes, with pure functions of weights and batch. A
table in the file, `LAYOUTS`, maps its logical axes to mesh axes; changing the parallelism is
naming another row of that table, or giving one of your own.
"""

from drumline.models.lm import LM, llama_1b3, llama_350m
from drumline.models.mlp import MLP
from drumline.models.vit import ViT, vit_b16, vit_l16, vit_s16

__all__ = [
    "LM",
    "MLP",
    "ViT",
    "llama_1b3",
    "llama_350m",
    "vit_b16",
    "vit_l16",
    "vit_s16",
]
