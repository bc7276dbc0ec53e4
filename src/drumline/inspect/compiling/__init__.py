"""Trace, lower and compile a function, and parse the compiled program."""
