"""The compiled step, the pipeline of dispatched steps, bad batches, and evaluation."""
