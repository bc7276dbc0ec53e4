"""`drumline numerics`: where JAX, PyTorch and exact arithmetic part ways."""

import typer

from drumline.cli.numerics import precision

app = typer.Typer(
    help="Where JAX, PyTorch and exact arithmetic part ways.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


@app.callback()
def _commands() -> None:
    """With a callback, the commands keep their names however many there are."""


app.command("precision")(precision.precision)
