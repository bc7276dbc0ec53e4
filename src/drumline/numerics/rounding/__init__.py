"""Find the effects of the compiler's freedom in rounding."""
