"""Dropless mixtures of experts, local and sharded."""
