"""Checkpoints: whole or not there, checked bit by bit, and with where they come from."""
