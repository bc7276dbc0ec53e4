"""The compiled step, the steps in flight, non-finite batches, and evaluation."""
