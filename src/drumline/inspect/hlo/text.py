"""HLO text as values: a module of computations of instructions.

One reader for what the CPU, GPU and TPU compilers print. It takes from each line what this room
needs and leaves the rest as text: attributes are split only when one of them is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from drumline.errors import UserError
from drumline.inspect.hlo.source import Places, SourcePlace, read_places

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8,
    "f8e4m3fn": 8, "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
    "token": 0, "opaque": 0,
}  # fmt: skip
"""The size of an element, by HLO's name of the type."""

_NUMPY = {
    "pred": "bool", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
    "c64": "complex64", "c128": "complex128",
} | {f"{sign[0]}{bits}": f"{sign}{bits}" for sign in ("int", "uint") for bits in (2, 4, 8)} | {
    f"s{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)
} | {f"u{bits}": f"uint{bits}" for bits in (16, 32, 64)}  # fmt: skip


def dtype_name(hlo: str) -> str:
    """The type as a JAX user writes it: `bfloat16` for `bf16`."""
    narrow = re.fullmatch(r"f([48])(e\w+)", hlo)
    return _NUMPY.get(hlo, f"float{narrow[1]}_{narrow[2]}" if narrow else hlo)


@dataclass(frozen=True, slots=True)
class Shape:
    """The type and the dimensions of an array, or the parts of a tuple."""

    dtype: str
    dims: tuple[int, ...] = ()
    parts: tuple[Shape, ...] = ()
    memory: int = 0
    """The memory space: 0 is HBM; on TPUs 1 is VMEM, and 5 is the host's memory."""

    @property
    def is_tuple(self) -> bool:
        """Whether it has parts, none being possible."""
        return self.dtype == "tuple"

    @property
    def elements(self) -> int:
        """The number of elements of an array."""
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        """The size, that of all parts together for a tuple."""
        if self.is_tuple:
            return sum(part.bytes for part in self.parts)
        return -(-self.elements * BITS.get(self.dtype, 32) // 8)

    def arrays(self) -> Iterator[Shape]:
        """The arrays it consists of."""
        if not self.is_tuple:
            yield self
        for part in self.parts:
            yield from part.arrays()


@dataclass(frozen=True, eq=False)
class Instruction:
    """One instruction; `rest` is what stands after its operands."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    rest: str
    literal: str
    """What stands between the parentheses of a constant or a parameter."""
    is_root: bool
    place: SourcePlace

    @cached_property
    def attributes(self) -> dict[str, str]:
        """Name and text of each attribute."""
        pairs = (part.partition("=") for part in split(self.rest))
        return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}

    def called(self) -> dict[str, tuple[str, ...]]:
        """The computations it names, by attribute."""
        found: dict[str, tuple[str, ...]] = {}
        for attribute, names in _CALLS.findall(self.rest):
            found[attribute] = tuple(_NAME.findall(names))
        return found

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """The numbers of an attribute such as `dimensions={0,1}`."""
        return tuple(int(n) for n in re.findall(r"-?\d+", self.attributes.get(attribute, "")))


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in the order of the text, which is the schedule where there is one."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """Each instruction by its name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The one whose value the computation gives."""
        marked = [instruction for instruction in self.instructions if instruction.is_root]
        return marked[-1] if marked else self.instructions[-1]

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by their number."""
        return {int(i.literal): i for i in self.instructions if i.opcode == "parameter"}

    @cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """Which instructions take each value."""
        found: dict[str, list[Instruction]] = {name: [] for name in self.by_name}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                if operand in found:
                    found[operand].append(instruction)
        return {name: tuple(users) for name, users in found.items()}


@dataclass(frozen=True, eq=False)
class Module:
    """A whole program as one device runs it."""

    name: str
    entry: Computation
    computations: dict[str, Computation] = field(repr=False)
    scheduled: bool
    head: str = field(repr=False)
    """The line that the text begins with."""

    @property
    def partitions(self) -> int:
        """The number of devices that run it."""
        found = re.search(r"num_partitions=(\d+)", self.head)
        replicas = re.search(r"replica_count=(\d+)", self.head)
        return max(int(m[1]) if m else 1 for m in (found, replicas))


_CALLS = re.compile(
    r"\b(to_apply|body|condition|calls|called_computations|branch_computations"
    r"|true_computation|false_computation|select|scatter)=(\{[^}]*\}|%?[\w.\-<>]+)"
)
_NAME = re.compile(r"[\w.\-<>]+")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\](?P<layout>\{[^}]*\})?")
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-<>]+)\s+\(.*\)\s*->.*\{\s*$")
_SHORT_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-<>]+)\s*\{\s*$")
_LINE = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-<>]+) = (?P<rest>.*)$")
_OPERAND = re.compile(r"%?([\w.\-<>#]+)$")
_MEMORY = re.compile(r"S\((\d+)\)")
_KERNEL = re.compile(r'\bkernel_metadata=\{(?:[^}"]|"(?:[^"\\]|\\.)*")*\}')
"""What JAX says of a Pallas kernel, on lines of its own in the middle of an instruction; strings in
it may hold braces."""


def parse_module(text: str) -> Module:
    """Read a module.

    Raises:
        UserError: the text is no HLO module.
    """
    text = _KERNEL.sub(lambda found: found[0].replace("\n", ""), text)
    head = next((line for line in text.splitlines() if line.startswith("HloModule")), "")
    if not head:
        raise UserError("this is no HLO text: it has no line that begins with HloModule")
    places = read_places(text)
    computations: dict[str, Computation] = {}
    entry = None
    instructions: list[Instruction] = []
    name, is_entry = "", False
    for line in text.splitlines():
        if not line:
            continue
        if line[0] == "}":
            if name:
                computations[name] = Computation(name, tuple(_with_parts(instructions)))
                entry = computations[name] if is_entry else entry
            name = ""
        elif line[0] in " \t":
            found = _LINE.match(line) if name else None
            if found:
                instructions.append(_instruction(found, places))
        else:
            header = _HEADER.match(line) or _SHORT_HEADER.match(line)
            if header and not line.startswith("HloModule"):
                name, instructions = header["name"], []
                is_entry = header["entry"] is not None
    if entry is None:
        raise UserError("this HLO text has no ENTRY computation: it is cut short")
    title = head.split(",")[0].removeprefix("HloModule").strip()
    return Module(title, entry, computations, "is_scheduled=true" in head, head)


def _with_parts(instructions: list[Instruction]) -> Iterator[Instruction]:
    """Write out `%loop#1`, a newer spelling of the get-tuple-element of a value's part."""
    known = {instruction.name: instruction for instruction in instructions}
    for instruction in instructions:
        for operand in instruction.operands:
            whole, *numbers = operand.split("#")
            for number in numbers:
                part = f"{whole}#{number}"
                if part not in known and whole in known:
                    value = known[whole]
                    parts = value.shape.parts
                    shape = parts[int(number)] if int(number) < len(parts) else value.shape
                    known[part] = Instruction(
                        part, shape, "get-tuple-element", (whole,), f"index={number}", "", False,
                        value.place,
                    )  # fmt: skip
                    yield known[part]
                whole = part
        yield instruction


def _instruction(found: re.Match[str], places: Places) -> Instruction:
    text = found["rest"]
    shape, at = _shape(text)
    opcode, _, _ = text[at:].lstrip().partition("(")
    start = text.index("(", at) + 1
    end = closing(text, start)
    inside = text[start : end - 1]
    literal = inside if opcode in ("constant", "parameter", "iota") else ""
    operands = () if literal else tuple(_operand(part) for part in split(inside))
    rest = text[end:].removeprefix(",").strip()
    return Instruction(
        name=found["name"],
        shape=shape,
        opcode=opcode.strip(),
        operands=tuple(name for name in operands if name),
        rest=rest,
        literal=literal,
        is_root=found["root"] is not None,
        place=places.of(rest),
    )


def _operand(text: str) -> str:
    # Either `%name`, or `f32[8]{0} %name`.
    found = _OPERAND.search(text.strip())
    return found[1] if found else ""


def _shape(text: str) -> tuple[Shape, int]:
    """The shape that the text begins with, and where it ends."""
    if text.startswith("("):
        end = closing(text, 1)
        parts = (_COMMENT.sub("", part).strip() for part in split(text[1 : end - 1]))
        return Shape("tuple", parts=tuple(_shape(part)[0] for part in parts if part)), end
    found = _ARRAY.match(text)
    if found is None:
        return Shape("token"), text.find(" ") if " " in text else len(text)
    dims = tuple(int(n) for n in re.findall(r"\d+", found["dims"]))
    memory = _MEMORY.search(found["layout"] or "")
    return Shape(found["dtype"], dims, memory=int(memory[1]) if memory else 0), found.end()


_COMMENT = re.compile(r"/\*.*?\*/")
_BRACKET = re.compile(r"""[()\[\]{},]|"(?:[^"\\]|\\.)*\"""")


def closing(text: str, start: int) -> int:
    """Just behind the bracket that closes the one before `start`."""
    depth = 1
    for found in _BRACKET.finditer(text, start):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
            if depth == 0:
                return found.end()
    return len(text)


def split(text: str) -> list[str]:
    """The parts between the commas that stand in no bracket and no string."""
    parts, depth, begin = [], 0, 0
    for found in _BRACKET.finditer(text):
        if found[0] in "([{":
            depth += 1
        elif found[0] in ")]}":
            depth -= 1
        elif found[0] == "," and depth == 0:
            parts.append(text[begin : found.start()])
            begin = found.end()
    parts.append(text[begin:])
    return [part for part in parts if part.strip()]


def without_fusions(module: Module) -> Module:
    """The same program with the instructions of every fusion in the fusion's place."""
    if not any(
        one.opcode == "fusion" for c in module.computations.values() for one in c.instructions
    ):
        return module
    done: dict[str, Computation] = {}
    for name in module.computations:
        _inline(name, module, done)
    return replace(module, computations=done, entry=done[module.entry.name])


def _inline(name: str, module: Module, done: dict[str, Computation]) -> Computation:
    if name in done:
        return done[name]
    given = module.computations[name]
    instructions: list[Instruction] = []
    for one in given.instructions:
        called = (one.called().get("calls") or ("",))[0] if one.opcode == "fusion" else ""
        if called in module.computations:
            instructions += _in_place(one, _inline(called, module, done))
        else:
            instructions.append(one)
    done[name] = Computation(name, tuple(instructions))
    return done[name]


def _in_place(fusion: Instruction, inner: Computation) -> list[Instruction]:
    """The fusion's instructions under names of their own; its root has the fusion's name."""
    names = {
        one.name: fusion.operands[int(one.literal)]
        if one.opcode == "parameter"
        else f"{fusion.name}/{one.name}"
        for one in inner.instructions
    }
    root = inner.root
    if root.opcode == "parameter":
        return [replace(fusion, opcode="bitcast", operands=(names[root.name],))]
    names[root.name] = fusion.name
    return [
        replace(
            one,
            name=names[one.name],
            operands=tuple(names.get(operand, operand) for operand in one.operands),
            is_root=one is root and fusion.is_root,
            place=one.place if one.place.op_name else fusion.place,
        )
        for one in inner.instructions
        if one.opcode != "parameter"
    ]
