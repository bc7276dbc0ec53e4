"""What went wrong that a user can mend, told in one sentence: what, where, and what to do."""


class Mistake(ValueError):
    """Its text is the whole sentence. The command line prints it and exits with 2."""


class Unwritable(OSError):
    """A disk that takes no more in the middle of a run. Its text is the whole sentence, too.

    The command line prints it and exits with 1: nothing in the command or the recipe is wrong.
    """
