"""What a user can mend, told in one sentence: what, where, and what to do."""


class Mistake(ValueError):
    """Its text is the whole sentence. The command line prints it and exits with 2."""
