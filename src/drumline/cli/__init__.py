"""The command line. A command imports its package when it runs, so that `--help` is fast.

A user error prints one message to stderr, without a traceback, and exits with code 2.
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
from drumline.cli.connect import USER_ERROR
from drumline.errors import UserError

# In the order of `--help`: commands for jobs, for inspection, and all others.
COMMANDS = {
    "create": "jobs:create",
    "list": "jobs:list_jobs",
    "show": "jobs:show",
    "plot": "plot:plot",
    "follow": "jobs:follow_job",
    "logs": "access:logs",
    "wait": "jobs:wait",
    "explain": "explain:explain",
    "resume": "jobs:resume",
    "cancel": "jobs:cancel",
    "delete": "jobs:delete",
    "clean": "jobs:clean",
    "exec": "access:run_command",
    "ssh": "access:ssh",
    "cp": "access:cp",
    "hosts": "hosts:app",
    "chips": "chips:chips",
    "inspect": "inspect:app",
    "numerics": "numerics:app",
    "burnin": "burnin:burnin",
    "init": "init:init",
    "docs": "docs:docs",
    "completion": "completion:completion",
    "server": "server:app",
    "emulator": "emulator:app",
}
COMPLETION_VARIABLE = "_DRUMLINE_COMPLETE"
"""The environment variable by which a shell asks for completions."""
# Errors of printing: a full disk, a reached quota or limit, a closed pipe.
OUTPUT_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF, errno.EPIPE}
# Help and errors without rich, whose import takes longer than the whole command.
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
}


class _Commands(TyperGroup):
    """A group that builds a command on demand, because building all of them is slow."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            # The suggestion of similar names uses the commands that are loaded.
            for name in COMMANDS:
                self.get_command(ctx, name)
            return None
        if cmd_name not in self.commands:
            module, _, attribute = COMMANDS[cmd_name].partition(":")
            command = getattr(import_module(f"drumline.cli.{module}"), attribute)
            if not isinstance(command, typer.Typer):
                single = typer.Typer(**PLAIN)
                # Unknown options of `drumline ssh` are passed on to the user's ssh.
                settings = {"ignore_unknown_options": True} if cmd_name == "ssh" else None
                single.command(name=cmd_name, context_settings=settings)(command)
                command = single
            self.commands[cmd_name] = typer.main.get_command(command)
        return self.commands[cmd_name]


app = typer.Typer(
    name="drumline",
    help="Train JAX models on preemptible TPUs.",
    no_args_is_help=True,
    cls=_Commands,
    **PLAIN,
)


def _print_version(requested: bool) -> None:
    if requested:
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
    if sys.stdout is None:
        typer.echo("stdout is closed; there is no place to print to", err=True)
        sys.exit(1)
    if COMPLETION_VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]

        completion_init()
    try:
        try:
            app(args=arguments, complete_var=COMPLETION_VARIABLE)
        finally:
            sys.stdout.flush()
    except UserError as error:
        from drumline.cli.rendering.text import sanitize_lines

        typer.echo(sanitize_lines(str(error)), err=True)
        sys.exit(USER_ERROR)
    except OSError as error:
        if error.errno not in OUTPUT_ERRORS or error.filename is not None:
            raise
        _exit_without_output(error)


def _exit_without_output(error: OSError) -> NoReturn:
    """Exit with a message, or without one if the reader of the output has closed the pipe."""
    # Otherwise the buffered output would fail again when Python exits.
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    if error.errno != errno.EPIPE:
        with suppress(OSError):
            typer.echo(f"the output cannot be written: {error.strerror}", err=True)
    sys.exit(1)
