"""Config files: a Python file with `def recipe(*, steps: int = 300, …) -> Recipe`.

The keyword arguments of `recipe` are the settings that `--set name=value` changes. Their
annotations determine how the text of a value is parsed.
"""

import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from drumline.chips.names import nearest
from drumline.errors import UserError
from drumline.train.recipe import Recipe, check_steps


@dataclass(frozen=True)
class ConfigFile:
    """A config file, loaded."""

    path: Path
    description: str
    recipe: Callable[..., Recipe]
    types: Mapping[str, Any]
    """The annotation of each setting."""
    defaults: Mapping[str, Any]
    """The defaults of the settings. Settings without a default are missing."""

    def make_recipe(self, assignments: Sequence[str]) -> Recipe:
        """Return the recipe with these settings, each given as `name=value`."""
        values = dict(self._parse(assignment) for assignment in assignments)
        missing = [name for name in self.types if name not in {**self.defaults, **values}]
        if missing:
            raise UserError(f"{self.path}: {missing[0]} has no default; --set {missing[0]}=…")
        # Check now, because most configs divide by the steps in a learning rate schedule.
        if self.types.get("steps") is int and "steps" in values:
            check_steps(values["steps"])
        recipe = self.recipe(**values)
        if not isinstance(recipe, Recipe):
            raise UserError(f"{self.path}: recipe returns {type(recipe).__name__}, not a Recipe")
        return recipe

    def help(self) -> str:
        """Return the docstring of the file and a list of its settings."""
        lines = [
            f"  {name}: {_type_name(type_)}" + self._default(name)
            for name, type_ in self.types.items()
        ]
        settings = "\n".join(lines) or "  none"
        return f"{self.description}\n\nsettings (--set name=value):\n{settings}\n"

    def _default(self, name: str) -> str:
        return f" = {self.defaults[name]!r}" if name in self.defaults else ""

    def _parse(self, assignment: str) -> tuple[str, Any]:
        name, equals, text = assignment.partition("=")
        name = name.strip()
        if not equals:
            raise UserError(f"--set {assignment}: write it as name=value")
        if name not in self.types:
            suggestions = nearest(name, self.types)
            settings = ", ".join(self.types)
            hint = f"did you mean {suggestions[0]}?" if suggestions else f"it has {settings}"
            raise UserError(f"--set {name}: {self.path.name} has no such setting; {hint}")
        return name, parse_value(name, text.strip(), self.types[name])


def load_config(path: str) -> ConfigFile:
    """Run a config file and return its recipe function with its settings."""
    file = Path(path)
    if not file.is_file():
        raise UserError(f"{path}: the file does not exist")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path}: not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    # As for a script, modules in the same folder can be imported, and they can import the config.
    sys.path.insert(0, str(file.parent.resolve()))
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    recipe = getattr(module, "recipe", None)
    if not callable(recipe):
        raise UserError(f"{path}: the file does not define a function recipe(*, …) -> Recipe")
    hints = typing.get_type_hints(recipe)
    parameters = inspect.signature(recipe).parameters
    for name, parameter in parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            raise UserError(f"{path}: write def recipe(*, {name}, …): settings are keyword-only")
    return ConfigFile(
        path=file,
        description=(module.__doc__ or str(file)).strip(),
        recipe=recipe,
        types={name: hints.get(name, str) for name in parameters},
        defaults={
            name: parameter.default
            for name, parameter in parameters.items()
            if parameter.default is not inspect.Parameter.empty
        },
    )


_DESCRIPTIONS = {
    int: "a whole number",
    float: "a number",
    bool: "yes or no",
    str: "text",
    Path: "a path",
}
_BOOLEANS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def parse_value(name: str, text: str, annotation: Any) -> Any:
    """Parse the text of a setting as its annotation requires."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        if text.lower() == "none" and type(None) in get_args(annotation):
            return None
        members = [member for member in get_args(annotation) if member is not type(None)]
        if len(members) == 1:
            return parse_value(name, text, members[0])
        for member in members:
            with suppress(UserError):
                return parse_value(name, text, member)
        kinds = [member for member in members if member is not int or float not in members]
        expected = " or ".join(map(_describe, kinds))
        raise UserError(f"--set {name}={text}: {text!r} is not {expected}")
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        matches = [value for value in choices if str(value) == text]
        if not matches:
            texts = [str(value) for value in choices]
            suggestions = nearest(text, texts)
            hint = f"did you mean {suggestions[0]}?" if suggestions else f"use {' or '.join(texts)}"
            raise UserError(f"--set {name}={text}: the value is not allowed; {hint}")
        return matches[0]
    try:
        if annotation is bool:
            return _BOOLEANS[text.lower()]
        if annotation is int:
            return _parse_int(text)
        if annotation in _DESCRIPTIONS:
            return annotation(text)
    except (ValueError, KeyError):
        expected = _DESCRIPTIONS[annotation]
        raise UserError(f"--set {name}={text}: {text!r} is not {expected}") from None
    type_name = _type_name(annotation)
    raise UserError(f"--set {name}: a {type_name} cannot be set here; change it in the file")


def _describe(annotation: Any) -> str:
    """Return a noun for the values of an annotation: `a whole number`, `auto`."""
    if get_origin(annotation) is Literal:
        return " or ".join(map(str, get_args(annotation)))
    return _DESCRIPTIONS.get(annotation) or _type_name(annotation)


def _parse_int(text: str) -> int:
    """Parse `1000`, `1_000` or `1e3`."""
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _type_name(annotation: Any) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return " | ".join(map(_type_name, get_args(annotation)))
    return str(annotation).replace("typing.", "")
