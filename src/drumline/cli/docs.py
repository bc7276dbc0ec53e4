"""`drumline docs`: list the pages of the documentation, and print one."""

from pathlib import Path
from typing import Annotated

import typer

from drumline.cli.connect import echo_json, echo_lines, on_terminal, runnable
from drumline.cli.options import AsJson


def pages() -> dict[str, Path]:
    """Return the file of each page by its name. A checkout has them beside the source."""
    package = Path(__file__).parents[1]
    folders = (package / "docs", package.parents[1] / "docs")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.md"))}


def _complete_page(incomplete: str) -> list[str]:
    return [name for name in pages() if name.startswith(incomplete)]


def docs(
    page: Annotated[
        str | None,
        typer.Argument(help="A page, such as jobs [default: list].", autocompletion=_complete_page),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the pages of the documentation, or print one."""
    from drumline.errors import UserError

    texts = {name: path.read_text(encoding="utf-8") for name, path in pages().items()}
    if page is None:
        titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in texts.items()}
        if as_json:
            echo_json([{"name": name, "title": title} for name, title in titles.items()])
            return
        width = max(map(len, titles), default=0)
        lines = [f"{name:{width}}  {title}" for name, title in titles.items()]
        echo_lines([*lines, runnable("next: drumline docs jobs")])
        return
    # A link of a page is accepted too: health.md#host-history.
    name = page.partition("#")[0].removesuffix(".md")
    if name not in texts:
        raise UserError(f"docs: there is no page {page!r}; the pages are {', '.join(texts)}")
    if as_json:
        echo_json({"name": name, "text": texts[name]})
    elif on_terminal():
        import click

        click.echo_via_pager(texts[name])
    else:
        typer.echo(texts[name], nl=False)
