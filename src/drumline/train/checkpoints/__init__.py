"""Checkpoints: complete or ignored, verified bit by bit, with the recipe that led to them."""
