"""The tests of a burn-in: each runs programs on a bench and tells what it observed."""
