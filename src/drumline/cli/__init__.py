"""The command line. A command imports the room it needs when it runs, so that `--help` is quick.

A user's mistake ends with one sentence on stderr and exit code 2, never with a traceback.
"""

import sys

import typer

from drumline import __version__
from drumline.cli.chips import chips

MISTAKE = 2

app = typer.Typer(
    name="drumline",
    help="Train JAX models on TPUs that can be taken away at any minute.",
    no_args_is_help=True,
    add_completion=False,
    # Both are drawn with rich, whose import costs more than the whole command.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command()(chips)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"drumline {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
) -> None:
    del version


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    from drumline.chips.names import UnknownName

    try:
        app(args=arguments)
    except UnknownName as mistake:
        typer.echo(str(mistake), err=True)
        sys.exit(MISTAKE)
