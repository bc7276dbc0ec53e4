"""One step under jit, its loss, its not-a-numbers, and evaluation."""
