"""Read YAML and keep the line and the spelling of each value.

For job files: errors name their line, `1.10` stays `1.10` as text, and a hostile document (tags,
alias bombs, endless nesting) gives a message instead of a crash. Plain numbers are those of YAML
1.2, without the octals, dates and base-60 numbers of YAML 1.1. `yes`, `no`, `on` and `off` are
booleans as in YAML 1.1, so that a user who meant text gets a message.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import yaml

from drumline.errors import UserError

MAX_BYTES = 1_000_000
TOO_LARGE = "is larger than 1 MB; put data in files in workdir or in a bucket"
# A job file has three levels and a few hundred values. These limits allow long lists.
MAX_DEPTH = 20
MAX_VALUES = 20_000

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Scalar:
    """A plain scalar that YAML does not read as text: `3e-4`, `no`, `8`."""

    value: bool | int | float
    text: str


@dataclass(frozen=True)
class Mark:
    """The line of a value, and the spelling of a scalar."""

    line: int
    text: str | None = None


@dataclass(frozen=True)
class DocumentError:
    """An error in one value or key of the document."""

    line: int | None
    path: KeyPath
    message: str


@dataclass
class Document:
    """The values (maps, lists, text, None, Scalar), the mark of each, and the errors."""

    value: Any
    marks: dict[KeyPath, Mark] = field(default_factory=dict)
    errors: list[DocumentError] = field(default_factory=list)


class InvalidYaml(UserError):
    """The document as a whole cannot be read."""

    def __init__(self, line: int | None, message: str) -> None:
        """The message does not contain the line."""
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
    """A loader of which only the composer is used. It builds nodes, never objects."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  PyYAML reads and fills it on the class
    _depth = 0
    _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose a node within the limits of depth and size."""
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise InvalidYaml(self.line + 1, f"has more than {MAX_DEPTH} levels")
        # Keys are nodes too. Counting them here rejects a long file early.
        if self._nodes > 2 * MAX_VALUES:
            raise InvalidYaml(None, f"has more than {MAX_VALUES:,} values")
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


for _tag, _pattern in (("null", _NULL), ("bool", _BOOL), ("int", _INT), ("float", _FLOAT)):
    # The resolver uses `match`, which accepts a prefix.
    _full = re.compile(rf"(?:{_pattern.pattern})\Z")
    _Loader.add_implicit_resolver(_PREFIX + _tag, _full, None)


def read(text: str) -> Document:
    """Return the values of a document and their lines. Raise InvalidYaml."""
    if len(text.encode(errors="replace")) > MAX_BYTES:
        raise InvalidYaml(None, TOO_LARGE)
    node = _compose(text)
    converter = _Converter()
    document = Document(None, converter.marks, converter.errors)
    if node is not None:
        document.value = converter.value(node, ())
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
        raise InvalidYaml(line, f"contains the control character {error.character:#x}") from None
    except yaml.MarkedYAMLError as error:
        message = _message(error)
        # Report an unclosed bracket or quote at its opening, not at the end of the file.
        marks = (error.problem_mark, error.context_mark)
        mark = next(filter(None, reversed(marks) if "never closed" in message else marks), None)
        raise InvalidYaml(mark.line + 1 if mark else None, message) from None
    except InvalidYaml:
        raise
    except (yaml.YAMLError, ValueError, OverflowError):
        # Bugs of the parser, as with "\UFFFFFFFF", which give no line.
        raise InvalidYaml(None, "is not valid YAML") from None


def _message(error: yaml.MarkedYAMLError) -> str:
    """Translate an error of the parser into a message with the fix."""
    problem, context = error.problem or "", error.context or ""
    if "'\\t'" in problem:
        return "a tab cannot indent YAML; use spaces"
    if "mapping values are not allowed" in problem:
        return "not valid YAML: unexpected colon; check the indentation, or quote the text"
    if "undefined alias" in problem:
        name = problem.removeprefix("found ")
        return f"not valid YAML: {name}; put text that starts with * in quotes"
    if "single document" in context:
        return "contains more than one YAML document; write one job per file"
    if "<document start>" in problem:
        return "not valid YAML: there is text after the end of the document"
    if "duplicate anchor" in context:
        return "not valid YAML: an anchor is defined twice"
    if "quoted scalar" in context and "end of stream" in problem:
        return "not valid YAML: a quote is never closed"
    if closing := re.fullmatch(r"expected ',' or '([]}])', but got .*", problem):
        return f"not valid YAML: a '{'[' if closing[1] == ']' else '{'}' is never closed"
    if start := re.match(r"found character '(.)' that cannot start", problem):
        return f"not valid YAML: text cannot start with {start[1]}; put it in quotes"
    if "expected <block end>" in problem:
        return "not valid YAML: the indentation does not match the lines above"
    return f"not valid YAML: {' '.join(ascii(problem)[1:-1].split()) or 'it cannot be parsed'}"


class _Converter:
    """Converts nodes to values and expands aliases up to a limit."""

    def __init__(self) -> None:
        self.marks: dict[KeyPath, Mark] = {}
        self.errors: list[DocumentError] = []
        self._values = 0
        self._open: list[int] = []

    def value(self, node: yaml.Node, path: KeyPath, line: int | None = None) -> Any:
        """Return the value of a node. For the value of a map, `line` is the line of its key."""
        line = line or node.start_mark.line + 1
        self.marks[path] = Mark(line, node.value if isinstance(node, yaml.ScalarNode) else None)
        self._values += 1
        if id(node) in self._open:
            raise InvalidYaml(line, "an alias refers to a value that contains it")
        if self._values > MAX_VALUES or len(self._open) > MAX_DEPTH:
            raise InvalidYaml(
                line, f"has more than {MAX_VALUES:,} values after its aliases are expanded"
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, line)
        self._open.append(id(node))
        try:
            if isinstance(node, yaml.SequenceNode):
                self._reject_tag(node, path, line, "seq")
                return [self.value(item, (*path, i)) for i, item in enumerate(node.value)]
            self._reject_tag(node, path, line, "map")
            return self._map(node, path)
        finally:
            self._open.pop()

    def _map(self, node: yaml.Node, path: KeyPath) -> dict[Hashable, Any]:
        result: dict[Hashable, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                self.errors.append(DocumentError(line, path, "a key must be text"))
                continue
            # A key is always the text as written, so that a variable may be called NO.
            key = self._clean(key_node.value, path, line)
            key_path = (*path, key)
            if key in result:
                first = self.marks[key_path].line
                self.errors.append(
                    DocumentError(
                        line, key_path, f"is a duplicate; the key is first set in line {first}"
                    )
                )
            elif key == "<<" and key_node.style is None:
                self.errors.append(
                    DocumentError(line, path, "<< is not supported; write the keys out")
                )
            else:
                result[key] = self.value(value_node, key_path, line)
        return result

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath, line: int) -> Any:
        text = self._clean(node.value, path, line)
        kind = node.tag.removeprefix(_PREFIX)
        try:
            match kind:
                case "null":
                    return None
                case "bool" if _BOOL.fullmatch(text):
                    return Scalar(text.casefold() in {"yes", "on", "true"}, text)
                case "int" if _INT.fullmatch(text):
                    return Scalar(int(text), text)
                case "int" | "float" if _FLOAT.fullmatch(text):
                    return Scalar(
                        float(text.casefold().replace(".inf", "inf").replace(".nan", "nan")), text
                    )
        except (ValueError, OverflowError):
            pass
        if kind not in {"str", "!"}:
            self._reject_tag(node, path, line, "str")
        return text

    def _reject_tag(self, node: yaml.Node, path: KeyPath, line: int, default: str) -> None:
        if node.tag not in {_PREFIX + default, "!"}:
            tag = node.tag.replace(_PREFIX, "!!")
            name = f"the tag {tag}" if tag.isprintable() and len(tag) < 60 else "this tag"
            self.errors.append(DocumentError(line, path, f"{name} is not allowed; remove it"))

    def _clean(self, text: str, path: KeyPath, line: int) -> str:
        """Replace NUL and lone surrogates from escapes: no shell or file accepts them."""
        cleaned = re.sub("[\0\ud800-\udfff]", "?", text)
        if cleaned != text:
            self.errors.append(
                DocumentError(line, path, "contains a character that is not valid in text")
            )
        return cleaned
