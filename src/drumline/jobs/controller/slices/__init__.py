"""What is done about slices: ask, connect, release, and find those that nobody holds."""
