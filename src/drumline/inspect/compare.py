"""`compare`: one function under several shardings and on several slices, as a table.

What a step takes, what it costs in dollars, and whether it fits: what to choose a slice by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.chips import TIERS, Price, UnknownName, price, zone_offers
from drumline.inspect.compiling.axes import shown
from drumline.inspect.compiling.lowering import told
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler
from drumline.inspect.cost.machines import Machine, machine
from drumline.inspect.estimate import Estimate, estimate
from drumline.inspect.mistakes import Mistake
from drumline.inspect.views.words import duration, size, table


@dataclass(frozen=True)
class Layout:
    """One way to lay a program out: the arguments as they are sharded on a mesh."""

    name: str
    arguments: tuple[Any, ...]
    mesh: MeshLike | None = None
    function: Callable[..., Any] | None = None
    """Where the layout needs a function of its own."""


@dataclass(frozen=True)
class ComparedLayout:
    """One layout on one slice."""

    layout: str
    on: str
    estimate: Estimate | None
    """None where the layout does not go on the slice; `why` says why."""
    why: str = ""
    dollars: float | None = None
    """Of one call at the cheapest listed price; None where none is listed."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        told = None if self.estimate is None else self.estimate.to_dict()
        return {
            "layout": self.layout,
            "on": self.on,
            "dollars": self.dollars,
            "why": self.why,
            "estimate": told,
        }


@dataclass(frozen=True)
class LayoutComparison:
    """Every layout on every slice, the quickest first; those that do not fit last."""

    choices: tuple[ComparedLayout, ...]
    tier: str

    @property
    def best(self) -> ComparedLayout | None:
        """The quickest that fits."""
        first = self.choices[0] if self.choices else None
        fits = first is not None and first.estimate is not None and first.estimate.fits
        return first if fits else None

    @property
    def cheapest(self) -> ComparedLayout | None:
        """That with the fewest dollars for a call, of those that fit."""
        priced = [
            choice
            for choice in self.choices
            if choice.dollars is not None and choice.estimate is not None and choice.estimate.fits
        ]
        return min(priced, key=lambda choice: choice.dollars or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"tier": self.tier, "choices": [choice.to_dict() for choice in self.choices]}

    def __str__(self) -> str:
        """The table, and what does not go and why."""
        rows = [_row(choice) for choice in self.choices if choice.estimate is not None]
        headings = ["LAYOUT", "ON", "MESH", "TIME", "MFU", "BOUND", "WAITS", "MEMORY", "", "$/1000"]
        lines = table(headings, rows, right="   rr rr r")
        lines += [
            f"{choice.layout} on {choice.on}: {choice.why}"
            for choice in self.choices
            if choice.estimate is None
        ]
        if any(choice.dollars is not None for choice in self.choices):
            lines.append(f"$/1000: of a thousand calls, at the cheapest {self.tier} price listed")
        return "\n".join(lines)


def _row(choice: ComparedLayout) -> list[str]:
    told = choice.estimate
    assert told is not None
    return [
        choice.layout,
        choice.on,
        shown(told.mesh) or "–",
        duration(told.seconds),
        f"{100 * told.mfu:.0f} %",
        told.bound,
        f"{100 * told.exposed / told.seconds:.0f} %" if told.seconds else "–",
        size(told.memory.total),
        "fits" if told.fits else f"of {size(told.memory_limit)}",
        "–" if choice.dollars is None else f"{1000 * choice.dollars:.3g}",
    ]


def compare(
    fn: Callable[..., Any],
    layouts: Iterable[Layout] | Mapping[str, Any],
    on: Sequence[str] | str,
    *,
    tier: str = "spot",
    compiler: Compiler = "auto",
) -> LayoutComparison:
    """Estimate a function under every layout on every slice.

    Args:
        fn: the function.
        layouts: `Layout`s, or arguments by the layout's name: `{"fsdp": (state, batch), …}`; or a
            function by that name, which makes either for a number of devices, as slices differ.
        on: names of slices.
        tier: whose prices, `"spot"` or `"on-demand"`.
        compiler: as for `estimate`.

    Raises:
        UnknownName: there is no such slice, or no such tier.
        Mistake: there is nothing to compare. A layout that does not go on a slice is told of in
            the table.
    """
    if isinstance(on, str):
        on = [on]
    if tier not in TIERS:
        raise UnknownName(f"{tier!r} is no tier of prices; there are {', '.join(TIERS)}")
    ways = _by_name(layouts)
    targets = [machine(name) for name in on]
    if not ways or not targets:
        raise Mistake("there is nothing to compare: name a layout and a slice at least")
    choices = [
        _choice(fn, (name, way), target, tier, compiler)
        for name, way in ways.items()
        for target in targets
    ]
    return LayoutComparison(tuple(sorted(choices, key=_order)), tier)


def _by_name(layouts: Iterable[Layout] | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(layouts, Mapping):
        return layouts
    listed = list(layouts)
    for way in listed:
        if not isinstance(way, Layout):
            raise Mistake(f"{way!r} is no Layout; give those, or arguments by the layout's name")
    names = [way.name for way in listed]
    if len(set(names)) < len(names):
        raise Mistake(f"two layouts have one name; they are {', '.join(names)}")
    return {way.name: way for way in listed}


def _layout(name: str, given: Any, target: Machine) -> Layout:
    """A layout as it was given, or as it is made for so many devices."""
    made = given
    if callable(given):
        try:
            made = given(target.devices)
        except Exception as wrong:  # whatever the user's function raises
            raise Mistake(f"cannot be made for {target.devices} devices: {told(wrong)}") from wrong
    if isinstance(made, Layout):
        return made
    return Layout(name, made if isinstance(made, tuple) else (made,))


def _choice(
    fn: Callable[..., Any],
    named: tuple[str, Any],
    target: Machine,
    tier: str,
    compiler: Compiler,
) -> ComparedLayout:
    name, given = named
    try:
        way = _layout(name, given, target)
        found = estimate(
            way.function or fn, *way.arguments, on=target.name, mesh=way.mesh, compiler=compiler
        )
    except Mistake as why:
        return ComparedLayout(name, target.name, None, str(why))
    rate = _dollars_per_second(target, tier)
    dollars = None if rate is None else rate * found.seconds
    return ComparedLayout(name, target.name, found, dollars=dollars)


def _dollars_per_second(target: Machine, tier: str) -> float | None:
    """Of the whole machine, where it is cheapest."""
    prices = [found.per_chip_hour for found in _prices(target, tier)]
    return min(prices) * target.chips / 3600 if prices else None


def _prices(target: Machine, tier: str) -> Iterable[Price]:
    if target.slice is None:
        return
    for offer in zone_offers(target.slice):
        found = price(target.slice, offer.zone, tier)
        if found is not None:
            yield found


def _order(choice: ComparedLayout) -> tuple[bool, bool, float]:
    told = choice.estimate
    if told is None:
        return (True, True, 0.0)
    return (False, not told.fits, told.seconds)
