"""A JAX model and the PyTorch model that it was ported from: where they part, and why."""
