"""`drumline completion`: candidates for what was typed in a shell, including job ids.

The shell calls it with the words so far, that under the cursor last, at each press of Tab. So
nothing is started for it, and an error means no candidates and no output.
"""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Iterable

SCRIPTS = {
    "bash": """\
_drumline() {
    local IFS=$'\\n'
    COMPREPLY=($("$1" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
}
complete -o default -F _drumline drumline jobman
""",
    "zsh": """\
_drumline() {
    local -a found
    found=(${(f)"$("$words[1]" completion words -- "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    if (( $#found )); then compadd -- $found; else _files; fi
}
compdef _drumline drumline jobman
""",
    "fish": """\
function _drumline
    set -l typed (commandline -opc)
    $typed[1] completion words -- $typed[2..] (commandline -ct) 2>/dev/null
end
complete -c drumline -a '(_drumline)'
complete -c jobman -a '(_drumline)'
""",
}
WHERE = {
    "bash": "~/.bashrc",
    "zsh": "~/.zshrc, after compinit",
    "fish": "~/.config/fish/config.fish",
}


def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the lines that complete commands and job ids."""
    from drumline.cli.connect import echo_json
    from drumline.jobs.connection import Refused

    if shell == "words":
        found = candidates(words or [""])
        echo_json(found) if as_json else typer.echo("\n".join(found), nl=bool(found))
        return
    if shell not in SCRIPTS:
        raise Refused(f"completion: {shell!r} is none of bash, zsh, fish")
    if as_json:
        echo_json({"shell": shell, "script": SCRIPTS[shell], "file": WHERE[shell]})
        return
    typer.echo(f'# in {WHERE[shell]}:  eval "$(drumline completion {shell})"')
    typer.echo(SCRIPTS[shell], nl=False)


def candidates(words: list[str]) -> list[str]:
    """Completions of the last of these words; none where the shell should complete files."""
    from drumline.cli import app

    *before, typed = words
    command: Any = typer.main.get_command(app)
    for at, word in enumerate(before):
        if not hasattr(command, "list_commands"):
            break
        command = command.get_command(None, word)
        if command is None:
            return []
        before_command = before[at + 1 :]
        if not hasattr(command, "list_commands"):
            return _within(command, before_command, typed)
    return _beginning(typed, command.list_commands(None))


def _within(command: Any, before: list[str], typed: str) -> list[str]:
    """Completions after a command: its options, or the jobs it takes."""
    if typed.startswith("-"):
        options = [option for parameter in command.params for option in parameter.opts]
        return _beginning(typed, sorted(option for option in options if option.startswith("--")))
    takes = [
        parameter.human_readable_name
        for parameter in command.params
        if not parameter.opts[0].startswith("-")
    ]
    given = [word for word in before if not word.startswith("-")]
    several = "[ID...]" in takes
    if several or (takes[:1] == ["ID"] and not given):
        return [job for job in _beginning(typed, _ids()) if job not in given]
    return []


def _beginning(typed: str, known: "Iterable[str]") -> list[str]:
    return [name for name in known if name.startswith(typed)]


def _ids() -> list[str]:
    """The jobs that `list` shows, the newest first; none where no server runs."""
    from drumline.jobs.client import Client, Refused

    try:
        return [str(job["id"]) for job in reversed(Client(autostart=False).list())]
    except (OSError, Refused):
        return []
