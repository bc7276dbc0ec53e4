"""The server process and what it does for its callers."""
