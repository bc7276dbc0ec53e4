"""How a mesh lies on the links of a machine, and how long a collective takes on them.

A mesh axis takes whole dimensions of the torus where sizes allow, and parts of one where they do
not. A part of a dimension, and a dimension whose ends are not joined, is a line: its end device
gets everything over one link, where in a ring two links share the work. Axes that no torus has room
for lie between slices, on the data-centre network.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import gcd, prod
from typing import Literal

from drumline.chips.torus import split_torus
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.cost.machines import Machine, TorusLine
from drumline.inspect.mistakes import Mistake

DCN = "dcn"
TOURS = "tours"
LaidAs = Mapping[str, tuple[int, ...]] | Literal["tours"]
SWITCH = "nvlink"


@dataclass(frozen=True)
class Laid:
    """Where a mesh axis lies."""

    lines: tuple[TorusLine, ...]
    slices: int = 1
    """How many slices it reaches across."""
    cores: int = 1
    """How many devices of one chip it runs over."""
    closes: bool = False
    """Whether a ring of permutes along it is a circle, with no hop longer than the others."""
    links: int = 1
    """The links of a hop, which as many groups of devices share."""

    def __str__(self) -> str:
        """In words: `ring of 16`, `line of 4 × line of 2`."""
        parts = [f"{self.slices} slices"] if self.slices > 1 else []
        parts += [f"{self.cores} cores of a chip"] if self.cores > 1 else []
        parts += [f"{'ring' if line.wraps else 'line'} of {line.length}" for line in self.lines]
        return " × ".join(parts) or "one device"


@dataclass(frozen=True)
class Network:
    """A mesh on a machine."""

    machine: Machine
    axes: Mapping[str, Laid]

    def resources(self, over: Iterable[str], direction: str = "") -> tuple[str, ...]:
        """The links that a collective over these axes keeps busy.

        A permute along a circle leaves the links of the other direction free. Along a line it does
        not: what goes from the last device to the first comes back over them.
        """
        if not self.machine.torus:
            return (SWITCH,)
        names = []
        for name in over:
            laid = self.axes[name]
            if not laid.lines and laid.cores == 1:
                continue
            ways = (direction,) if direction and laid.closes else ("up", "down")
            names += [f"ici {name} {way}" for way in ways]
        across = any(self.axes[name].slices > 1 for name in over)
        return (*names, *((DCN,) if across else ())) or ("ici",)

    def seconds(self, kind: str, taken: float, over: Iterable[str]) -> float:
        """How long a collective takes that each device enters with so many bytes."""
        laid = [self.axes[name] for name in over if name in self.axes]
        lines = [line for axis in laid for line in axis.lines if line.length > 1]
        slices = prod(axis.slices for axis in laid)
        cores = prod(axis.cores for axis in laid)
        members = prod(line.length for line in lines) * slices * cores
        if members <= 1:
            return 0.0
        if not self.machine.torus:
            return self._switched(kind, taken, prod(self._sizes(over)))
        inside = members // slices
        # Where hops are several links long, as many groups share each link.
        taken *= max(axis.links for axis in laid)
        start = self.machine.constants.collective
        if kind == "collective-permute":
            return start + self._permute(taken, laid, slices)
        if kind == "all-reduce":
            scattered = taken / inside
            return (
                start + 2 * self._spread(taken, lines, cores) + 2 * self._across(scattered, slices)
            )
        if kind == "all-to-all":
            return start + self._exchange(taken, lines, cores) + self._across(taken, slices)
        # All-gather and reduce-scatter are each other's mirror image: V is the larger array.
        whole = taken * members if kind == "all-gather" else taken
        return start + self._spread(whole, lines, cores) + self._across(whole / inside, slices)

    def _sizes(self, over: Iterable[str]) -> list[int]:
        laid = (self.axes[name] for name in over)
        return [
            prod(line.length for line in axis.lines) * axis.slices * axis.cores for axis in laid
        ]

    def _switched(self, kind: str, taken: float, members: int) -> float:
        constants = self.machine.constants
        factor = {
            "all-gather": members - 1.0,
            "reduce-scatter": (members - 1) / members,
            "all-to-all": (members - 1) / members,
            "all-reduce": 2 * (members - 1) / members,
        }.get(kind, 1.0)
        return constants.collective + constants.hop + factor * taken / self.machine.link

    def _spread(self, whole: float, lines: list[TorusLine], cores: int) -> float:
        """An all-gather that ends with, or a reduce-scatter that begins with, so many bytes."""
        if not lines:
            return self._in_chip(whole * (cores - 1) / cores) if cores > 1 else 0.0
        count = prod(line.length for line in lines)
        rate = sum(self.machine.link * (2 if line.wraps else 1) for line in lines)
        hops = sum(line.length // 2 if line.wraps else line.length - 1 for line in lines)
        return whole * (count - 1) / count / rate + hops * self.machine.constants.hop

    def _exchange(self, taken: float, lines: list[TorusLine], cores: int) -> float:
        """An all-to-all: half of everything crosses the middle of the longest dimension."""
        if not lines:
            return self._in_chip(taken * (cores - 1) / cores) if cores > 1 else 0.0
        worst = max(line.length / (8 if line.wraps else 4) for line in lines)
        hops = sum(line.length // 2 if line.wraps else line.length - 1 for line in lines)
        return taken * worst / self.machine.link + hops * self.machine.constants.hop

    def _permute(self, taken: float, laid: list[Laid], slices: int) -> float:
        if slices > 1:
            return taken / self.machine.dcn
        if not any(axis.lines for axis in laid):
            return self._in_chip(taken)
        # On a line, what goes from the last device to the first passes all others.
        hops = max(
            1 if axis.closes or line.wraps else line.length - 1
            for axis in laid
            for line in axis.lines
        ) * max(axis.links for axis in laid)
        return taken / self.machine.link + hops * self.machine.constants.hop

    def _in_chip(self, sent: float) -> float:
        """From one core of a chip to the other: as over a link, which no other core shares."""
        machine = self.machine
        return sent / (machine.link * machine.per_chip) + machine.constants.hop

    def _across(self, whole: float, slices: int) -> float:
        """The part of an all-gather or a reduce-scatter that goes from slice to slice."""
        if slices <= 1:
            return 0.0
        return whole * (slices - 1) / slices / self.machine.dcn


def lay(mesh: Axes, target: Machine, laid: LaidAs | None = None) -> Network:
    """Lay a mesh onto a machine: as told, or the largest axes first.

    Args:
        mesh: names and sizes.
        target: the machine.
        laid: the numbers of the torus' dimensions that an axis is to take, by name; or `"tours"`,
            for a mesh of all devices as `drumline.train.make_mesh` lays it.

    Raises:
        Mistake: an axis does not fit, or one is told of that the mesh has not.
    """
    if isinstance(laid, str) and laid != TOURS:
        raise Mistake(f"laid= is {laid!r}; it can be 'tours', or dimensions by the mesh axis")
    told = {} if laid is None or isinstance(laid, str) else laid
    for name in told:
        if name not in mesh:
            raise Mistake(f"laid= tells where mesh axis {name} lies, and the mesh is {shown(mesh)}")
    sizes = {name: size for name, size in mesh.items() if size > 1}
    if not target.torus:
        whole = {name: Laid((TorusLine(size, True),)) for name, size in sizes.items()}
        return Network(target, whole | dict.fromkeys(set(mesh) - set(sizes), Laid(())))
    found: dict[str, Laid] = {name: Laid(()) for name in mesh}
    free = {number: line for number, line in enumerate(target.torus) if line.length > 1}
    across = target.slices
    # Slices are far apart: the axis of just that size goes between them, or else the first that
    # has room for them, as meshes are written.
    fits = [name for name, size in sizes.items() if size % across == 0]
    outer = next((name for name in fits if sizes[name] == across), fits[0] if fits else None)
    cores = target.per_chip
    if laid == TOURS and (along := _along_the_links(sizes, target, outer)):
        return Network(target, found | along)
    for name in sorted(sizes, key=lambda name: (name not in told, -sizes[name])):
        size = sizes[name]
        if name in told:
            lines = tuple(free.pop(number) for number in told[name] if number in free)
            if prod(line.length for line in lines) != size:
                raise Mistake(
                    f"the dimensions told for mesh axis {name} do not hold {size} devices"
                )
            found[name] = Laid(lines, closes=all(line.wraps for line in lines))
            continue
        beyond = gcd(size, across) if name == outer or _too_large(size, free, cores) else 1
        size, across = size // beyond, across // beyond
        lines, free, rest = _take(size, free)
        inner = gcd(rest, cores)
        rest, cores = rest // inner, cores // inner
        if rest > 1:
            torus = "×".join(str(line.length) for line in target.torus)
            raise Mistake(
                f"mesh axis {name}={sizes[name]} of {shown(mesh)} does not fit on {target.name}, "
                f"whose chips are {torus}"
            )
        found[name] = Laid(lines, beyond, inner, bool(lines) and all(line.wraps for line in lines))
    return Network(target, found)


def _along_the_links(
    sizes: Mapping[str, int], target: Machine, outer: str | None
) -> dict[str, Laid] | None:
    """A mesh of all devices as `drumline.train.make_mesh` lays it, None for any other."""
    if target.slices > 1 and outer is None:
        return None
    across = {name: target.slices if name == outer else 1 for name in sizes}
    cores, left = {}, target.per_chip
    for name in reversed(list(sizes)):
        cores[name] = gcd(sizes[name] // across[name], left)
        left //= cores[name]
    chips = [sizes[name] // across[name] // cores[name] for name in sizes]
    topology = [line.length for line in target.torus]
    if prod(chips) != prod(topology) or left > 1:
        return None
    torus_axes = split_torus(topology, [line.wraps for line in target.torus], chips)
    found = {}
    for name, axis in zip(sizes, torus_axes, strict=True):
        sides = zip(axis.shape, axis.wraps, strict=True)
        lines = tuple(TorusLine(length, wraps) for length, wraps in sides if length > 1)
        found[name] = Laid(lines, across[name], cores[name], axis.is_ring, max(1, axis.max_links))
    return found


def _too_large(size: int, free: Mapping[int, TorusLine], cores: int) -> bool:
    return size > prod(line.length for line in free.values()) * cores


def _take(
    size: int, free: dict[int, TorusLine]
) -> tuple[tuple[TorusLine, ...], dict[int, TorusLine], int]:
    """Dimensions, or parts of them, for so many devices; what is left of both."""
    for many in range(1, len(free) + 1):
        for numbers in combinations(free, many):
            if prod(free[number].length for number in numbers) == size:
                taken = tuple(free[number] for number in numbers)
                return taken, {n: line for n, line in free.items() if n not in numbers}, 1
    lines, left = [], dict(free)
    for number, line in sorted(free.items(), key=lambda item: -item[1].length):
        part = gcd(size, line.length)
        if part > 1:
            lines.append(TorusLine(part, line.wraps and part == line.length))
            size //= part
            left[number] = TorusLine(line.length // part, False)
            if left[number].length == 1:
                del left[number]
    return tuple(lines), left, size
