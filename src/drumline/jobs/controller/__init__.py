"""The loop that keeps jobs going: observe, decide, write down, act."""
