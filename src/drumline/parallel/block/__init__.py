"""The Transformer block of the models, of `TransformerBlock` and of `MoEBlock`."""
