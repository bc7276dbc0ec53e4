"""Map a mesh to the links of a machine, and compute the duration of collectives.

A mesh axis uses whole dimensions of the torus if the sizes allow it, and parts of a dimension if
not. A dimension without wrap-around links, or a part of a dimension, is a line. Its end devices
receive everything over one link. In a ring, two links share the traffic. Axes that do not fit on a
torus run between slices, over the data-centre network. Those that do not fit on a node of GPUs run
between nodes, over the network of the nodes. The last axes are within a node.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import gcd, prod
from typing import Literal

from drumline.chips.torus import split_torus
from drumline.errors import UserError
from drumline.inspect.compiling.axes import MeshAxes, format_mesh
from drumline.inspect.cost.machines import Machine, TorusDimension

DCN = "dcn"
RINGS = "rings"
TorusDims = Mapping[str, tuple[int, ...]] | Literal["rings"]
"""The torus dimensions of each mesh axis, or `"rings"` for the mapping of `make_mesh`."""
SWITCH = "nvlink"


@dataclass(frozen=True)
class AxisLinks:
    """The links of a mesh axis."""

    dimensions: tuple[TorusDimension, ...]
    slices: int = 1
    """The number of slices along the axis, or of the nodes of GPUs."""
    cores: int = 1
    """The number of devices on one chip along the axis."""
    closed: bool = False
    """True if permutes around the axis form a ring without a long way back."""
    links_per_hop: int = 1
    """The links of a hop. As many groups of devices share them."""
    slice_name: str = "slices"

    def __str__(self) -> str:
        """Describe the links, such as `ring of 16` or `line of 4 × line of 2`."""
        descriptions = [f"{self.slices} {self.slice_name}"] if self.slices > 1 else []
        descriptions += [f"{self.cores} cores of a chip"] if self.cores > 1 else []
        descriptions += [
            f"{'ring' if dimension.wraps else 'line'} of {dimension.length}"
            for dimension in self.dimensions
        ]
        return " × ".join(descriptions) or "one device"


@dataclass(frozen=True)
class Network:
    """A mesh mapped to a machine."""

    machine: Machine
    axes: Mapping[str, AxisLinks]

    def resources(self, axes: Iterable[str], direction: str = "") -> tuple[str, ...]:
        """Return the names of the links that a collective over these axes uses.

        A permute around a closed ring leaves the links of the other direction free. On a line it
        uses both, because data from the last device to the first travels back over the line.
        """
        names = []
        crosses_slices = False
        for name in axes:
            links = self.axes[name]
            crosses_slices |= links.slices > 1
            if not self.machine.torus:
                names += [SWITCH] if links.dimensions and SWITCH not in names else []
                continue
            if not links.dimensions and links.cores == 1:
                continue
            directions = (direction,) if direction and links.closed else ("up", "down")
            names += [f"ici {name} {side}" for side in directions]
        default = "ici" if self.machine.torus else SWITCH
        return (*names, *((DCN,) if crosses_slices else ())) or (default,)

    def collective_seconds(self, kind: str, operand_bytes: float, axes: Iterable[str]) -> float:
        """Return the duration of a collective whose operand has this size on each device."""
        links = [self.axes[name] for name in axes if name in self.axes]
        dimensions = [
            dimension for axis in links for dimension in axis.dimensions if dimension.length > 1
        ]
        slices = prod(axis.slices for axis in links)
        cores = prod(axis.cores for axis in links)
        group_size = prod(dimension.length for dimension in dimensions) * slices * cores
        if group_size <= 1:
            return 0.0
        if not self.machine.torus:
            return self._switched(kind, operand_bytes, group_size // slices, slices)
        # Where a hop spans several links, as many groups share each link.
        operand_bytes *= max(axis.links_per_hop for axis in links)
        per_slice = group_size // slices
        latency = self.machine.constants.collective_seconds
        if kind == "collective-permute":
            return latency + self._permute(operand_bytes, links, slices)
        if kind == "all-reduce":
            scatter = self._scatter(operand_bytes, dimensions, cores)
            return (
                latency + 2 * scatter + 2 * self._between_slices(operand_bytes / per_slice, slices)
            )
        if kind == "all-to-all":
            exchange = self._exchange(operand_bytes, dimensions, cores)
            return latency + exchange + self._between_slices(operand_bytes, slices)
        # An all-gather is a reduce-scatter in reverse. The larger array determines both.
        array_bytes = operand_bytes * group_size if kind == "all-gather" else operand_bytes
        scatter = self._scatter(array_bytes, dimensions, cores)
        return latency + scatter + self._between_slices(array_bytes / per_slice, slices)

    def _switched(self, kind: str, operand_bytes: float, per_node: int, nodes: int) -> float:
        """Return the duration on GPUs. Each of them has its share of the network between nodes."""
        constants = self.machine.constants
        latency = constants.collective_seconds + constants.hop_seconds
        if kind == "collective-permute":
            bandwidth = self.machine.link_bandwidth if nodes == 1 else self.machine.dcn_bandwidth
            return latency + operand_bytes / bandwidth
        # Between nodes, the GPUs of a node exchange the parts that they have after the exchange
        # within the node. In an all-to-all, each GPU has other data for every GPU.
        array_bytes = operand_bytes * (per_node * nodes if kind == "all-gather" else 1)
        part_bytes = array_bytes if kind == "all-to-all" else array_bytes / per_node
        within = array_bytes * (per_node - 1) / per_node / self.machine.link_bandwidth
        seconds = within + self._between_slices(part_bytes, nodes)
        return latency + seconds * (2 if kind == "all-reduce" else 1)

    def _scatter(self, array_bytes: float, dimensions: list[TorusDimension], cores: int) -> float:
        """Return the duration of a reduce-scatter of an array, or an all-gather to it."""
        if not dimensions:
            return self._on_chip(array_bytes * (cores - 1) / cores) if cores > 1 else 0.0
        count = prod(dimension.length for dimension in dimensions)
        bandwidth = sum(
            self.machine.link_bandwidth * (2 if dimension.wraps else 1) for dimension in dimensions
        )
        latency = _hop_count(dimensions) * self.machine.constants.hop_seconds
        return array_bytes * (count - 1) / count / bandwidth + latency

    def _exchange(
        self, operand_bytes: float, dimensions: list[TorusDimension], cores: int
    ) -> float:
        """Return the duration of an all-to-all. Half the data crosses the longest dimension."""
        if not dimensions:
            return self._on_chip(operand_bytes * (cores - 1) / cores) if cores > 1 else 0.0
        bottleneck = max(
            dimension.length / (8 if dimension.wraps else 4) for dimension in dimensions
        )
        latency = _hop_count(dimensions) * self.machine.constants.hop_seconds
        return operand_bytes * bottleneck / self.machine.link_bandwidth + latency

    def _permute(self, operand_bytes: float, links: list[AxisLinks], slices: int) -> float:
        if slices > 1:
            return operand_bytes / self.machine.dcn_bandwidth
        if not any(axis.dimensions for axis in links):
            return self._on_chip(operand_bytes)
        # On a line, data from the last device to the first passes all others.
        hops = max(
            1 if axis.closed or dimension.wraps else dimension.length - 1
            for axis in links
            for dimension in axis.dimensions
        ) * max(axis.links_per_hop for axis in links)
        latency = hops * self.machine.constants.hop_seconds
        return operand_bytes / self.machine.link_bandwidth + latency

    def _on_chip(self, sent_bytes: float) -> float:
        """Return the duration of a transfer between cores: that over a link of their own."""
        bandwidth = self.machine.link_bandwidth * self.machine.devices_per_chip
        return sent_bytes / bandwidth + self.machine.constants.hop_seconds

    def _between_slices(self, array_bytes: float, slices: int) -> float:
        """Return the duration of the part of a collective that runs between slices."""
        if slices <= 1:
            return 0.0
        return array_bytes * (slices - 1) / slices / self.machine.dcn_bandwidth


def _hop_count(dimensions: list[TorusDimension]) -> int:
    return sum(
        dimension.length // 2 if dimension.wraps else dimension.length - 1
        for dimension in dimensions
    )


def map_mesh(mesh: MeshAxes, machine: Machine, torus_dims: TorusDims | None = None) -> Network:
    """Map a mesh to a machine. Axes without explicit dimensions are mapped by size.

    Args:
        mesh: names and sizes of the axes.
        machine: the machine.
        torus_dims: the indices of the torus dimensions for each axis by name, or `"rings"` for a
            mesh of all devices in the order of `drumline.train.make_mesh`.

    Raises:
        UserError: an axis does not fit, or `torus_dims` names an axis that the mesh does not have.
    """
    if torus_dims == "tours":  # type: ignore[comparison-overlap]
        message = "the value 'tours' is now 'rings'; the old one goes with version 0.3"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        torus_dims = RINGS
    if isinstance(torus_dims, str) and torus_dims != RINGS:
        raise UserError(
            f"torus_dims is {torus_dims!r}; give 'rings', or torus dimensions for each mesh axis"
        )
    explicit = {} if torus_dims is None or isinstance(torus_dims, str) else torus_dims
    for name in explicit:
        if name not in mesh:
            raise UserError(
                f"torus_dims has the mesh axis {name}, but the mesh is {format_mesh(mesh)}"
            )
    sizes = {name: size for name, size in mesh.items() if size > 1}
    axes: dict[str, AxisLinks] = {name: AxisLinks(()) for name in mesh}
    if not machine.torus:
        return Network(machine, axes | _map_nodes(sizes, machine))
    free = {index: dim for index, dim in enumerate(machine.torus) if dim.length > 1}
    slices, cores = machine.slices, machine.devices_per_chip
    # The network between slices is slow. Prefer an axis of exactly that size for it, else the
    # first axis that the number of slices divides.
    divisible = [name for name, size in sizes.items() if size % slices == 0]
    outer = next(
        (name for name in divisible if sizes[name] == slices), divisible[0] if divisible else None
    )
    if torus_dims == RINGS and (rings := _map_rings(sizes, machine, outer)):
        return Network(machine, axes | rings)
    for name in sorted(sizes, key=lambda name: (name not in explicit, -sizes[name])):
        size = sizes[name]
        if name in explicit:
            dims = tuple(free.pop(index) for index in explicit[name] if index in free)
            if prod(dim.length for dim in dims) != size:
                raise UserError(
                    f"the torus dimensions for the mesh axis {name} do not have {size} devices"
                )
            axes[name] = AxisLinks(dims, closed=all(dim.wraps for dim in dims))
            continue
        capacity = prod(dim.length for dim in free.values()) * cores
        axis_slices = gcd(size, slices) if name == outer or size > capacity else 1
        size, slices = size // axis_slices, slices // axis_slices
        dims, free, size = _allocate(size, free)
        axis_cores = gcd(size, cores)
        size, cores = size // axis_cores, cores // axis_cores
        if size > 1:
            torus = "×".join(str(dim.length) for dim in machine.torus)
            raise UserError(
                f"mesh axis {name}={sizes[name]} of {format_mesh(mesh)} does not fit on "
                f"{machine.name}, whose chips are {torus}"
            )
        closed = bool(dims) and all(dim.wraps for dim in dims)
        axes[name] = AxisLinks(dims, axis_slices, axis_cores, closed)
    return Network(machine, axes)


def _map_nodes(sizes: Mapping[str, int], machine: Machine) -> dict[str, AxisLinks]:
    """Map a mesh to nodes of GPUs in the order of their ids: the last axes are within a node."""
    axes, free = {}, machine.chips // machine.slices
    for name, size in reversed(list(sizes.items())):
        per_node = gcd(size, free)
        free //= per_node
        dimensions = (TorusDimension(per_node, True),) if per_node > 1 else ()
        axes[name] = AxisLinks(dimensions, slices=size // per_node, slice_name="nodes")
    return axes


def _map_rings(
    sizes: Mapping[str, int], machine: Machine, outer: str | None
) -> dict[str, AxisLinks] | None:
    """Map a mesh of all devices as `drumline.train.make_mesh` does. Return None for others."""
    if machine.slices > 1 and outer is None:
        return None
    slices = {name: machine.slices if name == outer else 1 for name in sizes}
    cores, free_cores = {}, machine.devices_per_chip
    for name in reversed(list(sizes)):
        cores[name] = gcd(sizes[name] // slices[name], free_cores)
        free_cores //= cores[name]
    chips = [sizes[name] // slices[name] // cores[name] for name in sizes]
    topology = [dimension.length for dimension in machine.torus]
    if prod(chips) != prod(topology) or free_cores > 1:
        return None
    shares = split_torus(topology, [dimension.wraps for dimension in machine.torus], chips)
    axes = {}
    for name, share in zip(sizes, shares, strict=True):
        extents = zip(share.shape, share.wraps, strict=True)
        dimensions = tuple(TorusDimension(length, wraps) for length, wraps in extents if length > 1)
        links_per_hop = max(1, share.max_links)
        axes[name] = AxisLinks(dimensions, slices[name], cores[name], share.is_ring, links_per_hop)
    return axes


def _allocate(
    size: int, free: dict[int, TorusDimension]
) -> tuple[tuple[TorusDimension, ...], dict[int, TorusDimension], int]:
    """Take whole dimensions, or parts of them, for a number of devices.

    Return the dimensions, the remaining free dimensions and the factor that did not fit.
    """
    for count in range(1, len(free) + 1):
        for indices in combinations(free, count):
            if prod(free[index].length for index in indices) == size:
                whole = tuple(free[index] for index in indices)
                return whole, {i: dim for i, dim in free.items() if i not in indices}, 1
    dimensions, remaining = [], dict(free)
    for index, dimension in sorted(free.items(), key=lambda item: -item[1].length):
        length = gcd(size, dimension.length)
        if length > 1:
            dimensions.append(
                TorusDimension(length, dimension.wraps and length == dimension.length)
            )
            size //= length
            remaining[index] = TorusDimension(dimension.length // length, False)
            if remaining[index].length == 1:
                del remaining[index]
    return tuple(dimensions), remaining, size
