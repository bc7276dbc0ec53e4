"""Parse HLO text into a module of computations of instructions.

One parser reads the output of the CPU, GPU and TPU compilers. The attributes of an instruction stay
text and are split on first use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from drumline.errors import UserError
from drumline.inspect.hlo.source import SourceLocation, SourceTable, read_source_table

BITS = {
    "pred": 8, "s2": 2, "u2": 2, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16,
    "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f16": 16, "bf16": 16, "f32": 32, "f64": 64,
    "c64": 64, "c128": 128, "f4e2m1fn": 4, "f8e3m4": 8, "f8e4m3": 8, "f8e4m3b11fnuz": 8,
    "f8e4m3fn": 8, "f8e4m3fnuz": 8, "f8e5m2": 8, "f8e5m2fnuz": 8, "f8e8m0fnu": 8,
    "token": 0, "opaque": 0,
}  # fmt: skip
"""The size of an element in bits, by the HLO name of its dtype."""

_NUMPY_NAMES = {
    "pred": "bool", "f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64",
    "c64": "complex64", "c128": "complex128",
} | {f"{sign[0]}{bits}": f"{sign}{bits}" for sign in ("int", "uint") for bits in (2, 4, 8)} | {
    f"s{bits}": f"int{bits}" for bits in (2, 4, 8, 16, 32, 64)
} | {f"u{bits}": f"uint{bits}" for bits in (16, 32, 64)}  # fmt: skip


def dtype_name(hlo_name: str) -> str:
    """Return the JAX name of an HLO dtype: `bfloat16` for `bf16`."""
    narrow = re.fullmatch(r"f([48])(e\w+)", hlo_name)
    return _NUMPY_NAMES.get(hlo_name, f"float{narrow[1]}_{narrow[2]}" if narrow else hlo_name)


@dataclass(frozen=True, slots=True)
class Shape:
    """The dtype and dimensions of an array, or the components of a tuple."""

    dtype: str
    dims: tuple[int, ...] = ()
    components: tuple[Shape, ...] = ()
    """The shapes in a tuple."""
    memory_space: int = 0
    """0 is HBM. On TPUs, 1 is VMEM and 5 is host memory."""

    @property
    def is_tuple(self) -> bool:
        """True for a tuple, even an empty one."""
        return self.dtype == "tuple"

    @property
    def elements(self) -> int:
        """The number of elements of an array."""
        return prod(self.dims)

    @property
    def bytes(self) -> int:
        """The size in bytes. For a tuple, the sum over its components."""
        if self.is_tuple:
            return sum(component.bytes for component in self.components)
        return -(-self.elements * BITS.get(self.dtype, 32) // 8)

    def arrays(self) -> Iterator[Shape]:
        """Yield the array itself, or all arrays of a tuple."""
        if not self.is_tuple:
            yield self
        for component in self.components:
            yield from component.arrays()


@dataclass(frozen=True, eq=False)
class Instruction:
    """One HLO instruction."""

    name: str
    shape: Shape
    opcode: str
    operands: tuple[str, ...]
    attribute_text: str
    """The text after the operands."""
    literal: str
    """The text in the parentheses of a constant, a parameter or an iota."""
    is_root: bool
    location: SourceLocation

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The attribute texts by name."""
        pairs = (attribute.partition("=") for attribute in split_at_commas(self.attribute_text))
        return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}

    def called_computations(self) -> dict[str, tuple[str, ...]]:
        """Return the names of the computations that the instruction calls, by attribute."""
        return {
            attribute: tuple(_NAME.findall(names))
            for attribute, names in _CALLS.findall(self.attribute_text)
        }

    def integers(self, attribute: str) -> tuple[int, ...]:
        """Return the integers of an attribute such as `dimensions={0,1}`."""
        return tuple(int(n) for n in re.findall(r"-?\d+", self.attributes.get(attribute, "")))


@dataclass(frozen=True, eq=False)
class Computation:
    """Instructions in text order, which is the schedule in a scheduled module."""

    name: str
    instructions: tuple[Instruction, ...]

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {instruction.name: instruction for instruction in self.instructions}

    @cached_property
    def root(self) -> Instruction:
        """The root instruction, which is the result."""
        roots = [instruction for instruction in self.instructions if instruction.is_root]
        return roots[-1] if roots else self.instructions[-1]

    @cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The parameters by index."""
        return {
            int(instruction.literal): instruction
            for instruction in self.instructions
            if instruction.opcode == "parameter"
        }

    @cached_property
    def users(self) -> dict[str, tuple[Instruction, ...]]:
        """The instructions that use a value, by its name."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.by_name}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                if operand in users:
                    users[operand].append(instruction)
        return {name: tuple(instructions) for name, instructions in users.items()}


@dataclass(frozen=True, eq=False)
class Module:
    """A program on a device."""

    name: str
    entry: Computation
    computations: dict[str, Computation] = field(repr=False)
    header: str = field(repr=False)
    """The `HloModule` line."""

    @property
    def partitions(self) -> int:
        """The number of devices that run the program."""
        partitions = re.search(r"num_partitions=(\d+)", self.header)
        replicas = re.search(r"replica_count=(\d+)", self.header)
        return max(int(match[1]) if match else 1 for match in (partitions, replicas))

    def fused_computation(self, instruction: Instruction) -> Computation | None:
        """Return the computation in the `calls` attribute of a fusion or an async start."""
        names = instruction.called_computations().get("calls") or ("",)
        return self.computations.get(names[0])


_CALLS = re.compile(
    r"\b(to_apply|body|condition|calls|called_computations|branch_computations"
    r"|true_computation|false_computation|select|scatter)=(\{[^}]*\}|%?[\w.\-<>]+)"
)
_NAME = re.compile(r"[\w.\-<>]+")
_ARRAY = re.compile(r"(?P<dtype>[a-z]\w*)\[(?P<dims>[^\]]*)\](?P<layout>\{[^}]*\})?")
_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-<>]+)\s+\(.*\)\s*->.*\{\s*$")
_SHORT_HEADER = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-<>]+)\s*\{\s*$")
_LINE = re.compile(r"^\s+(?P<root>ROOT )?%?(?P<name>[\w.\-<>]+) = (?P<definition>.*)$")
_OPERAND = re.compile(r"%?([\w.\-<>#]+)$")
_MEMORY_SPACE = re.compile(r"S\((\d+)\)")
_KERNEL_METADATA = re.compile(r'\bkernel_metadata=\{(?:[^}"]|"(?:[^"\\]|\\.)*")*\}')
"""JAX's metadata of a Pallas kernel. It spans several lines, and its strings may contain braces."""


def parse_module(text: str) -> Module:
    """Parse the text of a module.

    Raises:
        UserError: the text is not a complete HLO module.
    """
    text = _KERNEL_METADATA.sub(lambda match: match[0].replace("\n", ""), text)
    header = next((line for line in text.splitlines() if line.startswith("HloModule")), "")
    if not header:
        raise UserError("the text is not HLO: no line starts with HloModule")
    sources = read_source_table(text)
    computations: dict[str, Computation] = {}
    entry = None
    instructions: list[Instruction] = []
    name, is_entry = "", False
    for line in text.splitlines():
        if not line:
            continue
        if line[0] == "}":
            if name:
                computations[name] = Computation(name, tuple(_expand_components(instructions)))
                entry = computations[name] if is_entry else entry
            name = ""
        elif line[0] in " \t":
            match = _LINE.match(line) if name else None
            if match:
                instructions.append(_parse_instruction(match, sources))
        else:
            title = _HEADER.match(line) or _SHORT_HEADER.match(line)
            if title and not line.startswith("HloModule"):
                name, instructions = title["name"], []
                is_entry = title["entry"] is not None
    if entry is None:
        raise UserError("the HLO text is truncated: it has no ENTRY computation")
    module_name = header.split(",")[0].removeprefix("HloModule").strip()
    return Module(module_name, entry, computations, header)


def _expand_components(instructions: list[Instruction]) -> Iterator[Instruction]:
    """Replace operands such as `%loop#1`, a newer notation, by get-tuple-element instructions."""
    by_name = {instruction.name: instruction for instruction in instructions}
    for instruction in instructions:
        for operand in instruction.operands:
            name, *indices = operand.split("#")
            for index in indices:
                component = f"{name}#{index}"
                if component not in by_name and name in by_name:
                    value = by_name[name]
                    shapes = value.shape.components
                    shape = shapes[int(index)] if int(index) < len(shapes) else value.shape
                    by_name[component] = Instruction(
                        component, shape, "get-tuple-element", (name,), f"index={index}", "", False,
                        value.location,
                    )  # fmt: skip
                    yield by_name[component]
                name = component
        yield instruction


def _parse_instruction(match: re.Match[str], sources: SourceTable) -> Instruction:
    text = match["definition"]
    shape, shape_end = _parse_shape(text)
    opcode, _, _ = text[shape_end:].lstrip().partition("(")
    start = text.index("(", shape_end) + 1
    end = closing_bracket(text, start)
    arguments = text[start : end - 1]
    literal = arguments if opcode in ("constant", "parameter", "iota") else ""
    operands = () if literal else tuple(map(_operand_name, split_at_commas(arguments)))
    attribute_text = text[end:].removeprefix(",").strip()
    return Instruction(
        name=match["name"],
        shape=shape,
        opcode=opcode.strip(),
        operands=tuple(name for name in operands if name),
        attribute_text=attribute_text,
        literal=literal,
        is_root=match["root"] is not None,
        location=sources.locate(attribute_text),
    )


def _operand_name(text: str) -> str:
    # Either `%name` or `f32[8]{0} %name`.
    match = _OPERAND.search(text.strip())
    return match[1] if match else ""


def _parse_shape(text: str) -> tuple[Shape, int]:
    """Parse the shape at the start of the text. Return it and the position after it."""
    if text.startswith("("):
        end = closing_bracket(text, 1)
        components = (_COMMENT.sub("", c).strip() for c in split_at_commas(text[1 : end - 1]))
        return Shape("tuple", components=tuple(_parse_shape(c)[0] for c in components if c)), end
    match = _ARRAY.match(text)
    if match is None:
        return Shape("token"), text.find(" ") if " " in text else len(text)
    dims = tuple(int(n) for n in re.findall(r"\d+", match["dims"]))
    space = _MEMORY_SPACE.search(match["layout"] or "")
    return Shape(match["dtype"], dims, memory_space=int(space[1]) if space else 0), match.end()


_COMMENT = re.compile(r"/\*.*?\*/")
_BRACKET = re.compile(r"""[()\[\]{},]|"(?:[^"\\]|\\.)*\"""")


def closing_bracket(text: str, start: int) -> int:
    """Return the position after the bracket that closes the one before `start`."""
    depth = 1
    for match in _BRACKET.finditer(text, start):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
            if depth == 0:
                return match.end()
    return len(text)


def split_at_commas(text: str) -> list[str]:
    """Split at the commas outside brackets and strings."""
    segments, depth, start = [], 0, 0
    for match in _BRACKET.finditer(text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        elif match[0] == "," and depth == 0:
            segments.append(text[start : match.start()])
            start = match.end()
    segments.append(text[start:])
    return [segment for segment in segments if segment.strip()]


# Fusions of the CPU's compiler ----------------------------------------------------------------


def inline_fusions(module: Module) -> Module:
    """Replace fusions by their instructions, because a CPU and a TPU fuse differently."""
    if not any(
        instruction.opcode == "fusion"
        for computation in module.computations.values()
        for instruction in computation.instructions
    ):
        return module
    inlined: dict[str, Computation] = {}
    for name in module.computations:
        _inline_computation(name, module, inlined)
    return replace(module, computations=inlined, entry=inlined[module.entry.name])


def _inline_computation(name: str, module: Module, inlined: dict[str, Computation]) -> Computation:
    if name in inlined:
        return inlined[name]
    instructions: list[Instruction] = []
    for instruction in module.computations[name].instructions:
        fused = module.fused_computation(instruction) if instruction.opcode == "fusion" else None
        if fused is not None:
            body = _inline_computation(fused.name, module, inlined)
            instructions += _inline_fusion(instruction, body)
        else:
            instructions.append(instruction)
    inlined[name] = Computation(name, tuple(instructions))
    return inlined[name]


def _inline_fusion(fusion: Instruction, body: Computation) -> list[Instruction]:
    """Return the instructions of a fusion under unique names. The root takes the fusion's name."""
    names = {
        instruction.name: fusion.operands[int(instruction.literal)]
        if instruction.opcode == "parameter"
        else f"{fusion.name}/{instruction.name}"
        for instruction in body.instructions
    }
    root = body.root
    if root.opcode == "parameter":
        return [replace(fusion, opcode="bitcast", operands=(names[root.name],))]
    names[root.name] = fusion.name
    return [
        replace(
            instruction,
            name=names[instruction.name],
            operands=tuple(names.get(operand, operand) for operand in instruction.operands),
            is_root=instruction is root and fusion.is_root,
            location=instruction.location if instruction.location.op_name else fusion.location,
        )
        for instruction in body.instructions
        if instruction.opcode != "parameter"
    ]
