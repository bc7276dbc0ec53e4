"""Checkpoints: complete or ignored, verified bit by bit, and marked with their recipe."""
