"""`drumline completion`: print the shell script that completes commands, options and jobs."""

from typing import Annotated

import typer

from drumline.cli.options import AsJson

FILES = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc, after compinit",
    "fish": "~/.config/fish/config.fish",
}


def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
    as_json: AsJson = False,
) -> None:
    """Print a shell script that completes commands and jobs."""
    from typer.completion import get_completion_script  # type: ignore[attr-defined]

    from drumline.cli import COMPLETION_VARIABLE
    from drumline.cli.connect import echo_json
    from drumline.errors import UserError

    if shell not in FILES:
        raise UserError(f"completion: {shell!r} is not one of {', '.join(FILES)}")
    script = "\n".join(
        get_completion_script(prog_name=name, complete_var=COMPLETION_VARIABLE, shell=shell)
        for name in ("drumline", "jobman")
    )
    if as_json:
        echo_json({"shell": shell, "script": script, "file": FILES[shell]})
        return
    typer.echo(f'# in {FILES[shell]}:  eval "$(drumline completion {shell})"')
    typer.echo(script)
