"""What slices cost, and what a project may hold."""
