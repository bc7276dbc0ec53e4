"""Slices by accelerator name (`v4-128`): chips, hosts, topology, wrap-around links.

The suffix of a name counts TensorCores or chips, depending on the generation. On 7x it counts
TensorCores, two per chip, as in the accelerator types of GKE (`TPU_ACCELERATOR_TYPE=tpu7x-8` with
topology 2x2x1), in MaxText and in xpk. Google's pages count chips and name only topologies.

A host has 1, 4 or 8 chips, depending on the size. Sizes are tables, because formulas fail for
v5litepod-8, v6e-8 and v5p-16.
"""

import re
from dataclasses import dataclass
from functools import cached_property

from drumline.chips.catalogue import Chip, chip
from drumline.chips.names import UnknownName, nearest

Topology = tuple[int, ...]

# v4, v5p and 7x pods consist of 4×4×4 cubes behind optical switches. These are the numbers of cubes
# in a slice. Sources: the accelerator types of the Cloud TPU API (crawl of 2026-08-22) for v4 and
# v5p, and the documentation for 7x, up to the pod of 9,216 chips.
_CUBE = 4
_V4_CUBES = tuple(range(1, 49))
_V5P_CUBES = (
    *range(1, 67), 68, 69, 70, 72, 74, 75, 76, 77, 78, 80, 81, 82,
    84, 85, 86, 87, 88, 90, 91, 92, 93, 94, 95, 96,
)  # fmt: skip
_7X_CUBES = (1, 2, 4, 8, 16, 32, 144)

_BELOW_A_CUBE: dict[int, Topology] = {4: (2, 2, 1), 8: (2, 2, 2), 16: (2, 2, 4), 32: (2, 4, 4)}
_EIGHT_CHIP_HOSTS: dict[int, Topology] = {
    1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8),
    128: (8, 16), 256: (16, 16),
}  # fmt: skip


def _most_cubic(cubes: int) -> Topology:
    """Return the default topology, which is nearest to a cube according to Google's docs."""
    shapes = (
        (a, b, cubes // (a * b))
        for a in range(1, cubes + 1)
        if cubes % a == 0
        for b in range(a, cubes // a + 1)
        if cubes % (a * b) == 0 and cubes // (a * b) >= b
    )
    return tuple(_CUBE * length for length in min(shapes, key=sum))


@dataclass(frozen=True)
class _Generation:
    """A generation as the Cloud TPU API offers it."""

    chip: Chip
    prefix: str
    suffix_counts_cores: bool
    topologies: dict[int, Topology]
    """The topologies of slices without cubes, by number of chips."""
    image: str | None
    """The runtime image, or None if the Cloud TPU API does not serve the generation."""
    cubes: tuple[int, ...] = ()
    pod_length: int | None = None
    """The length of a 2D pod's axes. An axis wraps around only if it spans the pod."""

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The suffixes in ascending order."""
        chips = (*self.topologies, *(_CUBE**3 * count for count in self.cubes))
        return tuple(count * self._per_chip for count in chips)

    @property
    def _per_chip(self) -> int:
        return (self.chip.cores or 1) if self.suffix_counts_cores else 1

    def slice(self, size: int) -> "Slice":
        """Return the slice with a suffix from `sizes`."""
        chips = size // self._per_chip
        topology = self.topologies.get(chips) or _most_cubic(chips // _CUBE**3)
        return Slice(
            name=f"{self.prefix}-{size}",
            chip=self.chip,
            chips=chips,
            # v5e and v6e slices of up to 8 chips have a single host.
            chips_per_host=chips if self.topologies is _EIGHT_CHIP_HOSTS and chips <= 8 else 4,
            topology=topology,
            wraps=self.wraps(topology),
            runtime_image=self.image,
        )

    def wraps(self, topology: Topology) -> tuple[bool, ...]:
        """Return True for dimensions whose ends are linked."""
        if self.pod_length is not None:
            return tuple(length == self.pod_length for length in topology)
        # The optical switches link only the ends of whole cubes.
        return (all(length % _CUBE == 0 for length in topology),) * len(topology)


_V2: dict[int, Topology] = {4: (2, 2), 16: (4, 4), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
_V3: dict[int, Topology] = _V2 | {32: (4, 8), 512: (16, 32), 1024: (32, 32)}
_BASE = "tpu-ubuntu2204-base"
_GENERATIONS = {
    generation.prefix: generation
    for generation in (
        _Generation(chip("v2"), "v2", True, _V2, _BASE, pod_length=16),
        _Generation(chip("v3"), "v3", True, dict(sorted(_V3.items())), _BASE, pod_length=32),
        _Generation(chip("v4"), "v4", True, _BELOW_A_CUBE, _BASE, cubes=_V4_CUBES),
        _Generation(
            chip("v5e"), "v5litepod", False, _EIGHT_CHIP_HOSTS, "v2-alpha-tpuv5-lite", pod_length=16
        ),
        _Generation(chip("v5p"), "v5p", True, _BELOW_A_CUBE, "v2-alpha-tpuv5", cubes=_V5P_CUBES),
        _Generation(chip("v6e"), "v6e", False, _EIGHT_CHIP_HOSTS, "v2-alpha-tpuv6e", pod_length=16),
        _Generation(chip("7x"), "tpu7x", True, _BELOW_A_CUBE, None, cubes=_7X_CUBES),
    )
}
_SPELLINGS = {"v5e": "v5litepod", "v5lite": "v5litepod", "7x": "tpu7x", "v7x": "tpu7x"}
_NAME = re.compile(r"(?P<prefix>[a-z0-9]+)-(?P<size>[1-9][0-9]{0,8})")


@dataclass(frozen=True)
class IciAxis:
    """An axis of the torus, for the cost model."""

    name: str
    length: int
    wraps: bool
    link_bandwidth: float
    """Unidirectional bytes per second of a link."""


@dataclass(frozen=True)
class Slice:
    """A TPU slice. `name` is its accelerator type in the Cloud TPU API."""

    name: str
    chip: Chip
    chips: int
    chips_per_host: int
    topology: Topology
    wraps: tuple[bool, ...]
    runtime_image: str | None

    @property
    def generation(self) -> str:
        """The chip's name: `v5e` for v5litepod-16."""
        return self.chip.name

    @property
    def cores(self) -> int:
        """The number of TensorCores."""
        return self.chips * (self.chip.cores or 1)

    @property
    def hosts(self) -> int:
        """The number of hosts (virtual machines)."""
        return self.chips // self.chips_per_host

    @property
    def hbm_bytes(self) -> float:
        """The total memory of all chips."""
        return self.chips * self.chip.hbm_bytes

    @property
    def peak_bf16_flops(self) -> float:
        """The total peak of all chips, per second."""
        return self.chips * self.chip.peak_bf16_flops

    def mesh_axes(self) -> tuple[IciAxis, ...]:
        """Return the ICI axes in the order of the topology, including those of length 1."""
        return tuple(
            IciAxis(name, length, wraps, self.chip.link_bandwidth)
            for name, length, wraps in zip("xyz", self.topology, self.wraps, strict=False)
        )


def slices() -> tuple[Slice, ...]:
    """Return all slices by generation, starting with the oldest."""
    return tuple(
        generation.slice(size) for generation in _GENERATIONS.values() for size in generation.sizes
    )


def wraps_of(generation: str, topology: Topology) -> tuple[bool, ...]:
    """Return True for dimensions of a topology whose ends are linked.

    `generation` is a chip's name, such as `v5e`.
    """
    prefix = _SPELLINGS.get(generation, generation)
    if prefix not in _GENERATIONS:
        raise UnknownName(_unknown_generation(generation, generation))
    return _GENERATIONS[prefix].wraps(topology)


def slice_of(name: str) -> Slice:
    """Return the slice of an accelerator name. Case and surrounding space do not matter."""
    folded = name.strip().casefold()
    if not folded:
        raise UnknownName("the name of the accelerator is empty; examples: v4-8, v5litepod-16")
    prefix = folded.partition("-")[0]
    generation = _GENERATIONS.get(_SPELLINGS.get(prefix, prefix))
    if generation is None:
        raise UnknownName(_unknown_generation(name, prefix))
    match = _NAME.fullmatch(folded)
    size = int(match["size"]) if match else 0
    if size in generation.sizes:
        return generation.slice(size)
    sizes = f"{prefix} comes in {_join_sizes(generation.sizes)}"
    if match is None:
        raise UnknownName(f"{name!r} does not end in the size of a slice; {sizes}")
    smaller = [other for other in generation.sizes if other < size][-1:]
    larger = [other for other in generation.sizes if other > size][:1]
    suggestions = ", ".join(f"{prefix}-{other}" for other in smaller + larger)
    raise UnknownName(f"{name!r}: {sizes}; nearest: {suggestions}")


def _unknown_generation(name: str, prefix: str) -> str:
    generations = ", ".join(_GENERATIONS)
    try:
        if chip(prefix).kind == "gpu":
            return f"{name!r} names a GPU; only TPUs have slices: {generations}"
    except UnknownName:
        pass
    matches = nearest(prefix, [*_GENERATIONS, *_SPELLINGS])
    hint = f"; nearest: {', '.join(matches)}" if matches else ""
    return f"{name!r} starts with no TPU generation; the generations are {generations}{hint}"


def _join_sizes(sizes: tuple[int, ...]) -> str:
    names = [str(size) for size in sizes]
    return ", ".join(names if len(names) <= 10 else [*names[:8], "…", names[-1]])
