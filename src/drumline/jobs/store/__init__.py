"""The job database: what is kept, how it is found again, and when it is forgotten."""
