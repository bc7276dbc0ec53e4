"""Collective matmuls in a single TPU kernel each."""
