"""The rendering of the server's answers as text and drawings. Pure."""
