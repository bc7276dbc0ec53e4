"""Reads YAML with the line of each value and how it was written.

For job files: a mistake names its line, `1.10` stays `1.10` where text is wanted, and a hostile
document (tags, alias bombs, endless nesting) gives a sentence, not a crash. Plain numbers are those
of YAML 1.2, without the octals, dates and base-60 numbers of 1.1; `yes`, `no`, `on` and `off` are
still distinguished from text, so that a user who meant text gets a message.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import yaml

MAX_BYTES = 1_000_000
TOO_LARGE = "is larger than 1 MB; data belongs in files in workdir or in a bucket"
# A job file nests three deep and holds a few hundred values; these leave room for long lists.
MAX_DEPTH = 20
MAX_VALUES = 20_000

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Written:
    """A plain scalar that YAML does not read as text: `3e-4`, `no`, `8`."""

    value: bool | int | float
    text: str


@dataclass(frozen=True)
class Mark:
    """The place of a value; `text` is a scalar as it was written."""

    line: int
    text: str | None = None


@dataclass(frozen=True)
class Flaw:
    """Something in the document that cannot be read as meant."""

    line: int | None
    path: Path
    message: str


@dataclass
class Document:
    """The values (maps, lists, text, None, Written), the place of each, and what was wrong."""

    value: Any
    marks: dict[Path, Mark] = field(default_factory=dict)
    flaws: list[Flaw] = field(default_factory=list)


class NotYaml(Exception):
    """The text as a whole cannot be read. Its text is the sentence for the user."""

    def __init__(self, line: int | None, message: str) -> None:
        """`line` is kept apart from the message."""
        super().__init__(message)
        self.line = line


_BOOL = re.compile(r"(?i:yes|no|on|off|true|false)")
_INT = re.compile(r"[-+]?[0-9]{1,18}")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(?i:inf)|\.(?i:nan)"
)
_NULL = re.compile(r"~|(?i:null)|")
_PREFIX = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """Only the composer is used, which builds nodes, never objects."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  PyYAML reads and fills it on the class
    _depth = 0
    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose as usual, but no deeper than a job file can be."""
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise NotYaml(self.line + 1, f"nested more than {MAX_DEPTH} deep")
        # Keys are nodes too. They are counted here so that a long file is refused early.
        if self._nodes > 2 * MAX_VALUES:
            raise NotYaml(None, f"holds more than {MAX_VALUES:,} values")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


for _tag, _pattern in (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT)):
    # The resolver uses `match`, which accepts a prefix.
    _whole = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(_PREFIX + _tag, _whole, None)


def read(text: str) -> Document:
    """The values of a document with the line of each. Raises NotYaml."""
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise NotYaml(None, TOO_LARGE)
    node = _compose(text)
    walk = _Walk()
    document = Document(None, walk.marks, walk.flaws)
    if node is not None:
        document.value = walk.value(node, ())
    return document


def _compose(text: str) -> yaml.Node | None:
    try:
        loader = _Loader(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise NotYaml(line, f"holds the control character {error.character:#x}") from None
    except yaml.MarkedYAMLError as error:
        sentence = _sentence(error)
        # What is never closed is to be fixed where it opens, not where the file ends.
        marks = (error.problem_mark, error.context_mark)
        mark = next(filter(None, reversed(marks) if "never closed" in sentence else marks), None)
        raise NotYaml(mark.line + 1 if mark else None, sentence) from None
    except (yaml.YAMLError, ValueError, OverflowError):
        # Bugs of the parser, as with "\UFFFFFFFF": it does not say where.
        raise NotYaml(None, "is not valid YAML") from None


def _sentence(error: yaml.MarkedYAMLError) -> str:
    """The error of the parser as a sentence that says what to do."""
    problem, context = error.problem or "", error.context or ""
    if "'\\t'" in problem:
        return "a tab cannot indent YAML; use spaces"
    if "mapping values are not allowed" in problem:
        return "not valid YAML: a colon that YAML cannot place; check the indent, or quote the text"
    if "undefined alias" in problem:
        return f"not valid YAML: {problem.removeprefix('found ')}; put text with a * in quotes"
    if "single document" in context:
        return "holds more than one YAML document; write one job a file"
    if "<document start>" in problem:
        return "not valid YAML: the document ends before this"
    if "duplicate anchor" in context:
        return "not valid YAML: the same anchor twice"
    if "quoted scalar" in context and "end of stream" in problem:
        return "not valid YAML: a quote is opened and never closed"
    if opened := re.fullmatch(r"expected ',' or '([]}])', but got .*", problem):
        return f"not valid YAML: a '{'[' if opened[1] == ']' else '{'}' is never closed"
    if start := re.match(r"found character '(.)' that cannot start", problem):
        return f"not valid YAML: text cannot begin with {start[1]}; put it in quotes"
    if "expected <block end>" in problem:
        return "not valid YAML: the indent does not fit the lines above"
    return f"not valid YAML: {' '.join(ascii(problem)[1:-1].split()) or 'it cannot be parsed'}"


class _Walk:
    """Turns nodes into values, expanding aliases up to a limit."""

    def __init__(self) -> None:
        self.marks: dict[Path, Mark] = {}
        self.flaws: list[Flaw] = []
        self._values = 0
        self._open: list[int] = []

    def value(self, node: yaml.Node, path: Path, line: int | None = None) -> Any:
        """The node's value; `line` is that of its key, where it has one."""
        line = line or node.start_mark.line + 1
        self.marks[path] = Mark(line, node.value if isinstance(node, yaml.ScalarNode) else None)
        self._values += 1
        if id(node) in self._open:
            raise NotYaml(line, "an alias refers to what it stands in")
        if self._values > MAX_VALUES or len(self._open) > MAX_DEPTH:
            raise NotYaml(line, f"aliases expand it beyond {MAX_VALUES:,} values")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, line)
        self._open.append(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                self._refuse_tag(node, path, line, "seq")
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            self._refuse_tag(node, path, line, "map")
            return self._map(node, path)
        finally:
            self._open.pop()

    def _map(self, node: yaml.Node, path: Path) -> dict[Hashable, Any]:
        result: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.flaws.append(Flaw(line, path, "a key must be text"))
                continue
            # A key is always text as it was written, so that a variable may be called NO.
            key = self._clean(key_node.value, path, line)
            inside = (*path, key)
            if key in result:
                first = self.marks[inside].line
                self.flaws.append(Flaw(line, inside, f"given twice, first in line {first}"))
            elif key == "<<" and key_node.style is None:
                self.flaws.append(Flaw(line, path, "<< is not supported; write the keys out"))
            else:
                result[key] = self.value(value_node, inside, line)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: Path, line: int) -> Any:
        text = self._clean(node.value, path, line)
        kind = node.tag.removeprefix(_PREFIX)
        try:
            match kind:
                case "null":
                    return None
                case "bool" if _BOOL.fullmatch(text):
                    return Written(text.casefold() in {"yes", "on", "true"}, text)
                case "int" if _INT.fullmatch(text):
                    return Written(int(text), text)
                case "int" | "float" if _FLOAT.fullmatch(text):
                    return Written(
                        float(text.casefold().replace(".inf", "inf").replace(".nan", "nan")), text
                    )
        except (ValueError, OverflowError):
            pass
        if kind not in {"str", "!"}:
            self._refuse_tag(node, path, line, "str")
        return text

    def _refuse_tag(self, node: yaml.Node, path: Path, line: int, usual: str) -> None:
        if node.tag not in {_PREFIX + usual, "!"}:
            tag = node.tag.replace(_PREFIX, "!!")
            shown = tag if tag.isprintable() and len(tag) < 60 else "of that kind"
            self.flaws.append(Flaw(line, path, f"the tag {shown} is not allowed; leave it out"))

    def _clean(self, text: str, path: Path, line: int) -> str:
        """The text without NUL and lone surrogates from escapes: no shell or file accepts them."""
        cleaned = re.sub("[\0\ud800-\udfff]", "?", text)
        if cleaned != text:
            self.flaws.append(Flaw(line, path, "holds a character that no text can have"))
        return cleaned
