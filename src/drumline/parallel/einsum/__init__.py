"""`einsum`: matmuls of sharded arrays on the ring that fits their shardings."""
