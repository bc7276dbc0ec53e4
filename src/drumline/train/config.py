"""Config files: a Python file with `def recipe(*, steps: int = 300, …) -> Recipe`.

Its keyword arguments are the settings that `--set name=value` can change; their annotations say how
a value is read.
"""

import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from drumline.chips.names import nearest
from drumline.train.mistakes import Mistake
from drumline.train.recipe import Recipe, check_steps


@dataclass(frozen=True)
class ConfigFile:
    """A config file that has been read."""

    path: Path
    about: str
    recipe: Callable[..., Recipe]
    kinds: Mapping[str, Any]
    """Setting → its annotation."""
    defaults: Mapping[str, Any]
    """Setting → its default; settings without one are missing here."""

    def make(self, assignments: Sequence[str]) -> Recipe:
        """The recipe with these settings, each `name=value`."""
        given = dict(self._read(assignment) for assignment in assignments)
        missing = [name for name in self.kinds if name not in {**self.defaults, **given}]
        if missing:
            raise Mistake(f"{self.path}: {missing[0]} has no default; --set {missing[0]}=…")
        # Most files make a schedule of them, which divides by them before there is a recipe.
        if self.kinds.get("steps") is int and "steps" in given:
            check_steps(given["steps"])
        made = self.recipe(**given)
        if not isinstance(made, Recipe):
            raise Mistake(f"{self.path}: recipe returns {type(made).__name__}, not a Recipe")
        return made

    def help(self) -> str:
        """What the file says about itself, and what can be set."""
        lines = [
            f"  {name}: {_named(kind)}" + self._default(name) for name, kind in self.kinds.items()
        ]
        settings = "\n".join(lines) or "  none"
        return f"{self.about}\n\nsettings (--set name=value):\n{settings}\n"

    def _default(self, name: str) -> str:
        return f" = {self.defaults[name]!r}" if name in self.defaults else ""

    def _read(self, assignment: str) -> tuple[str, Any]:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals:
            raise Mistake(f"--set {assignment}: write it as name=value")
        if name not in self.kinds:
            near = nearest(name, self.kinds)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(self.kinds)}"
            raise Mistake(f"--set {name}: {self.path.name} has no such setting; {hint}")
        return name, read_value(name, text.strip(), self.kinds[name])


def load_config(path: str) -> ConfigFile:
    """Run a config file and find its recipe."""
    file = Path(path)
    if not file.is_file():
        raise Mistake(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise Mistake(f"{path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # As Python does for a script: what lies beside it can be imported, and finds it by name.
    sys.path.insert(0, str(file.parent.resolve()))
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    recipe = getattr(module, "recipe", None)
    if not callable(recipe):
        raise Mistake(f"{path}: it defines no function recipe(*, …) -> Recipe")
    hints = typing.get_type_hints(recipe)
    settings = inspect.signature(recipe).parameters
    for name, setting in settings.items():
        if setting.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise Mistake(f"{path}: write def recipe(*, {name}, …): settings go by name")
    return ConfigFile(
        path=file,
        about=(module.__doc__ or str(file)).strip(),
        recipe=recipe,
        kinds={name: hints.get(name, str) for name in settings},
        defaults={
            name: setting.default
            for name, setting in settings.items()
            if setting.default is not inspect.Parameter.empty
        },
    )


_KINDS = {int: "a whole number", float: "a number", bool: "yes or no", str: "text", Path: "a path"}
_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def read_value(name: str, text: str, kind: Any) -> Any:
    """A value from the command line, as its annotation wants it."""
    if get_origin(kind) in (typing.Union, types.UnionType):
        if text.lower() == "none" and type(None) in get_args(kind):
            return None
        kinds = [one for one in get_args(kind) if one is not type(None)]
        for one in kinds:
            try:
                return read_value(name, text, one)
            except Mistake as mistake:
                if one is kinds[-1]:
                    raise mistake from None
    if get_origin(kind) is Literal:
        found = [value for value in get_args(kind) if str(value) == text]
        if not found:
            words = [str(value) for value in get_args(kind)]
            near = nearest(text, words)
            hint = f"did you mean {near[0]}?" if near else f"use {' or '.join(words)}"
            raise Mistake(f"--set {name}={text}: no such choice; {hint}")
        return found[0]
    try:
        if kind is bool:
            return _WORDS[text.lower()]
        if kind is int:
            return _whole(text)
        if kind in _KINDS:
            return kind(text)
    except (ValueError, KeyError):
        raise Mistake(f"--set {name}={text}: {text!r} is not {_KINDS[kind]}") from None
    raise Mistake(f"--set {name}: a {_named(kind)} cannot be set here; change it in the file")


def _whole(text: str) -> int:
    """`1000`, `1_000` or `1e3`."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _named(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).replace("typing.", "")
