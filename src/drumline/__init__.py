"""Drumline trains JAX models on TPUs that can be taken away at any minute."""

__version__ = "0.1.0"
