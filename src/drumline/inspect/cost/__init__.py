"""The cost model: work, network, timeline and memory of a compiled program on a machine."""
