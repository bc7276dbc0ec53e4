"""`drumline numerics`: where JAX, PyTorch and exact arithmetic part ways."""

import typer

from drumline.cli.numerics import repeat, topk

app = typer.Typer(
    help="Where JAX, PyTorch and exact arithmetic part ways.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("repeat")(repeat.repeat)
app.command("topk")(topk.topk)
