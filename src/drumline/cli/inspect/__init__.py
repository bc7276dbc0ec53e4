"""`drumline inspect`: what XLA made of a program, and what it will cost.

`drumline inspect MODULE:FUNCTION` is the command `program`; anything that names no command is meant
for it.
"""

from typing import Any

import typer
from typer.core import TyperGroup

from drumline.cli.inspect.profile import profile
from drumline.cli.inspect.program import program

PROGRAM = "program"


class _Programs(TyperGroup):
    """Takes what names no command as the name of a program."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] not in (["--help"], *([name] for name in self.commands)):
            args = [PROGRAM, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    help="What XLA made of a program, and what it will cost.",
    cls=_Programs,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command(PROGRAM)(program)
app.command("profile")(profile)
