"""What a compiled program takes on a machine: work, network, timeline, memory."""
