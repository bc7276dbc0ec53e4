"""Matmuls of grouped rows, with one matrix per group."""
