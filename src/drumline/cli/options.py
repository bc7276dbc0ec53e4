"""Options that several of the commands share, and what they need to be installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
TargetName = Annotated[
    str,
    typer.Argument(metavar="MODULE:FUNCTION", help="The function to run, such as sampler.py:step."),
]
InputsName = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="NAME",
        help="The function of that module that returns the arguments; without it, inputs().",
    ),
]


def need_jax() -> None:
    """Refuse, in one sentence, to go on without JAX."""
    from drumline.errors import UserError

    if find_spec("jax") is None:
        raise UserError("jax is not installed, and this needs it: pip install 'drumline[jax]'")


@contextmanager
def prints_aside() -> Iterator[None]:
    """What the user's own code prints meanwhile goes to stderr: stdout is for the report."""
    with redirect_stdout(sys.stderr):
        yield
