"""`drumline numerics`: where JAX, PyTorch and exact arithmetic part ways."""

import typer

from drumline.cli.numerics.matmul import matmul
from drumline.cli.numerics.precision import precision
from drumline.cli.numerics.repeat import repeat
from drumline.cli.numerics.topk import topk

app = typer.Typer(
    help="Where JAX, PyTorch and exact arithmetic part ways.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("matmul")(matmul)
app.command("precision")(precision)
app.command("topk")(topk)
app.command("repeat")(repeat)
