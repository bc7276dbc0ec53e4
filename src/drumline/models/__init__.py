"""Models to read and to train: an MLP, a Vision Transformer, a decoder with or without experts.

Each model is one file with one frozen dataclass of options and pure functions of weights and batch.
The table `LAYOUTS` in the file maps its logical axes to mesh axes. To change the parallelism, name
another row of the table or pass a mapping.
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
