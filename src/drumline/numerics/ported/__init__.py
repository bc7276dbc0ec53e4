"""Compare a ported model with its PyTorch original, layer by layer."""
