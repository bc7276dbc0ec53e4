"""Models to read and to train: an MLP, a Vision Transformer, a decoder with or without experts.

A model is a frozen dataclass of options with pure functions of weights and batch. `LAYOUTS` in its
file maps logical axes to mesh axes by layout. To change the parallelism, pass the name of a layout
or a mapping.
"""

from drumline.models.lm import LM, llama_1b3, llama_350m
from drumline.models.mlp import MLP
from drumline.models.vit import ViT, vit_b16, vit_l16, vit_s16
from drumline.parallel.block.attention import RotaryScaling

__all__ = [
    "LM",
    "MLP",
    "RotaryScaling",
    "ViT",
    "llama_1b3",
    "llama_350m",
    "vit_b16",
    "vit_l16",
    "vit_s16",
]
