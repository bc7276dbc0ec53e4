"""The exceptions of Drumline. The text of each is one sentence: the problem, its place, the fix."""


class UserError(ValueError):
    """An error in a user's input. The command line prints it and exits with 2."""


class HostError(Exception):
    """A host cannot be reached, or its agent does not work."""


class StorageError(HostError, OSError):
    """A checkpoint folder can no longer be written. The training command exits with 1."""


class InternalError(Exception):
    """A defect or an unreadable state of Drumline itself."""
