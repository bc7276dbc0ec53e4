"""What is wrong with what a user asked to have inspected, in one sentence."""


class Mistake(Exception):
    """A mistake in the user's input: what was wrong, where, and what to do."""
