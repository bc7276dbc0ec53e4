"""`einsum` over sharded arrays: which ring their shardings call for, and what it sends."""
