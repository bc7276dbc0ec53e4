"""Matrix products whose operands, or whose sums, travel round a ring of devices."""
