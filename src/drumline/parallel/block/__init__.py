"""The Transformer block, tensor parallel, with every projection on a ring."""
