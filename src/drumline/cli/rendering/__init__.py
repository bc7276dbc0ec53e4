"""From the server's answers to text and drawings. Pure."""
