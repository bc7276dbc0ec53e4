"""XLA's own text of a program, read: instructions, loops, groups of devices, source lines."""
