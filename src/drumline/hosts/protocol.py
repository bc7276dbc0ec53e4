"""The values that the job manager and the hosts exchange, whatever the way to reach the hosts."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Admission:
    """The decision about a host from its history."""

    refused: str = ""
    """The reason why the host may not be used; empty if it may."""
    burnin: float = 0.0
    """The seconds of burn-in that the host needs before the program; 0 for none."""


Admit = Callable[[int, Mapping[str, str]], Admission]
"""A function that decides about a host from its index and its identity."""


def admit_all(index: int, identity: Mapping[str, str]) -> Admission:
    """Admit every host without a burn-in."""
    del index, identity
    return Admission()


Stream = Literal["stdout", "stderr"]
OnOutput = Callable[[Stream, bytes], Awaitable[None]]
"""A callback for each piece of a command's output."""


MAX_PROBLEMS = 20
"""The number of files of one host that are reported with the reason why they were not copied."""


@dataclass
class HostCopy:
    """The result of a copy of outputs from one host."""

    files: int = 0
    """The number of files that were copied, because they were new or had changed."""
    bytes: int = 0
    error: str = ""
    """The reason why not all files could be copied; empty if the host sent what it has."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Files that were not copied, each with the reason."""
    left_out: int = 0
    """The number of files that were not copied."""

    def leave_out(self, name: str, reason: str) -> None:
        """Record a file that was not copied."""
        self.left_out += 1
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append((_printable(name), _printable(reason)))


def _printable(text: str) -> str:
    """Limit a text of a host to a short one of printable characters."""
    return "".join(character if character.isprintable() else "?" for character in text[:300])
