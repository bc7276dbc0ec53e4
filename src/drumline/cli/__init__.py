"""The command line. A command imports what it needs when it runs, so that `--help` is quick.

A user's mistake ends with one sentence on stderr and exit code 2, never with a traceback.
"""

import errno
import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from drumline import __version__
from drumline.cli.connect import MISTAKE

# In the order of `--help`: the life of a job, then inspection, then everything else.
COMMANDS = {
    "create": "jobs:create",
    "list": "jobs:list_jobs",
    "show": "jobs:show",
    "plot": "plot:plot",
    "follow": "jobs:follow_job",
    "logs": "access:logs",
    "wait": "jobs:wait",
    "resume": "jobs:resume",
    "cancel": "jobs:cancel",
    "delete": "jobs:delete",
    "clean": "jobs:clean",
    "exec": "access:run_command",
    "ssh": "ssh:ssh",
    "cp": "ssh:cp",
    "hosts": "hosts:app",
    "chips": "chips:chips",
    "inspect": "inspect:app",
    "numerics": "numerics:app",
    "burnin": "burnin:burnin",
    "init": "init:init",
    "completion": "completion:completion",
    "server": "server:app",
    "emulator": "emulator:app",
}
# An exception whose module was never imported cannot have been raised.
MISTAKES = (
    ("drumline.chips.names", "UnknownName"),
    ("drumline.errors", "UserError"),
    ("drumline.jobs.connection", "Refused"),
    ("drumline.jobs.spec", "SpecError"),
)
# Errors of printing: the disk is full, a quota or a limit is reached, the pipe is closed.
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE}
# Both are drawn with rich, whose import takes longer than the whole command.
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class _Commands(TyperGroup):
    """Builds a command on demand: reading the options of all commands takes longer."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            # The hint at similar names is made from the commands that are loaded.
            for known in COMMANDS:
                self.get_command(ctx, known)
            return None
        if cmd_name not in self.commands:
            module, _, attribute = COMMANDS[cmd_name].partition(":")
            found = getattr(import_module(f"drumline.cli.{module}"), attribute)
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(**PLAIN)
                # Options that our ssh does not have are for the user's ssh.
                settings = {"ignore_unknown_options": True} if cmd_name == "ssh" else None
                alone.command(name=cmd_name, context_settings=settings)(found)
                found = alone
            self.commands[cmd_name] = typer.main.get_command(found)
        return self.commands[cmd_name]


app = typer.Typer(
    name="drumline",
    help="Train JAX models on TPUs that can be taken away at any minute.",
    no_args_is_help=True,
    cls=_Commands,
    **PLAIN,
)


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


def _mistakes() -> tuple[type[Exception], ...]:
    known = ((sys.modules.get(module), name) for module, name in MISTAKES)
    return tuple(getattr(module, name) for module, name in known if module is not None)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    if sys.stdout is None:
        typer.echo("stdout is closed: there is nowhere to print to", err=True)
        sys.exit(1)
    try:
        try:
            app(args=arguments)
        finally:
            sys.stdout.flush()
    except _mistakes() as mistake:
        from drumline.cli.rendering.text import harmless_lines

        typer.echo(harmless_lines(str(mistake)), err=True)
        sys.exit(MISTAKE)
    except OSError as trouble:
        if trouble.errno not in UNWRITABLE or trouble.filename is not None:
            raise
        _give_up_printing(trouble)


def _give_up_printing(trouble: OSError) -> NoReturn:
    """Exit with one sentence; with none where the reader of our output has closed the pipe."""
    # Buffered output would fail once more as Python exits.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if trouble.errno != errno.EPIPE:
        with suppress(OSError):
            typer.echo(f"the output cannot be written: {trouble.strerror}", err=True)
    sys.exit(1)
