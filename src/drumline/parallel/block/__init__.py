"""The Transformer block, once for the models and for blocks that stand alone, plain or on rings."""
