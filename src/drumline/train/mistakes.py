"""What a user got wrong, told in one sentence: what, where, and what to do about it."""


class Mistake(ValueError):
    """Its text is the whole sentence. The command line prints it and exits with 2."""
