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

from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.cost.machines import Machine, TorusLine
from drumline.inspect.mistakes import Mistake

DCN = "dcn"
SWITCH = "nvlink"


@dataclass(frozen=True)
class Laid:
    """Where a mesh axis lies."""

    lines: tuple[TorusLine, ...]
    slices: int = 1
    """How many slices it reaches across."""
    cores: int = 1
    """How many devices of one chip it runs over."""

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

        A permute along a ring leaves the links of the other direction free. Along a line it does
        not: what goes from the last device to the first comes back over them.
        """
        if not self.machine.torus:
            return (SWITCH,)
        names = []
        for name in over:
            laid = self.axes[name]
            if not laid.lines and laid.cores == 1:
                continue
            ring = bool(laid.lines) and all(line.wraps for line in laid.lines)
            ways = (direction,) if direction and ring else ("up", "down")
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
        start = self.machine.constants.collective
        if kind == "collective-permute":
            return start + self._permute(taken, lines, slices)
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

    def _permute(self, taken: float, lines: list[TorusLine], slices: int) -> float:
        if slices > 1:
            return taken / self.machine.dcn
        if not lines:
            return self._in_chip(taken)
        # On a line, what goes from the last device to the first passes all others.
        hops = max(1 if line.wraps else line.length - 1 for line in lines)
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


def lay(mesh: Axes, target: Machine, laid: Mapping[str, tuple[int, ...]] | None = None) -> Network:
    """Lay a mesh onto a machine: as told, or the largest axes first.

    Args:
        mesh: names and sizes.
        target: the machine.
        laid: the numbers of the torus' dimensions that an axis is to take, by name.

    Raises:
        Mistake: an axis does not fit, or one is told of that the mesh has not.
    """
    told = laid or {}
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
    for name in sorted(sizes, key=lambda name: (name not in told, -sizes[name])):
        size = sizes[name]
        if name in told:
            lines = tuple(free.pop(number) for number in told[name] if number in free)
            if prod(line.length for line in lines) != size:
                raise Mistake(
                    f"the dimensions told for mesh axis {name} do not hold {size} devices"
                )
            found[name] = Laid(lines)
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
        found[name] = Laid(lines, beyond, inner)
    return Network(target, found)


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
