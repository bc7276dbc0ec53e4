"""The exceptions of Drumline. The text of each is one sentence: the problem, its place, the fix."""


class UserError(ValueError):
    """An error in a user's input. The command line prints it and exits with 2."""


class CloudError(Exception):
    """A call of the cloud that failed, after the retries that made sense."""

    def __init__(self, message: str, code: int | None = None) -> None:
        """`code` is the cloud's error code, or None if no answer came."""
        super().__init__(message)
        self.code = code


class HostError(Exception):
    """A host cannot be reached, or its agent does not work."""


class CheckpointError(HostError, OSError):
    """A checkpoint folder can no longer be written. The training command exits with 1."""


class InternalError(Exception):
    """A defect or an unreadable state of Drumline itself."""
