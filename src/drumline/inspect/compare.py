"""`compare`: a table of estimates for variants of a program on several slices.

The table shows the duration of a call, its price in dollars, and if it fits in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drumline.chips import TIERS, UnknownName, price, zone_offers
from drumline.deprecated import renamed_attribute, renamed_keywords
from drumline.errors import UserError
from drumline.inspect.compiling.axes import format_mesh
from drumline.inspect.compiling.lowering import describe_error
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler
from drumline.inspect.cost.machines import Machine, parse_machine
from drumline.inspect.estimate import Estimate, estimate
from drumline.inspect.formatting import format_bytes, format_seconds, format_share, format_table


@dataclass(frozen=True)
class ProgramVariant:
    """A program with arguments sharded over a mesh."""

    name: str
    arguments: tuple[Any, ...]
    mesh: MeshLike | None = None
    function: Callable[..., Any] | None = None
    """The function of the variant, if it differs from that of the comparison."""


@dataclass(frozen=True)
class VariantEstimate:
    """The estimate of a variant on a slice."""

    variant: str
    on: str
    estimate: Estimate | None
    """None if the variant cannot run on the slice, for the cause in `reason`."""
    reason: str = ""
    dollars: float | None = None
    """The price of a call at the lowest listed price, or None without a listed price."""
    zone: str | None = None
    """The zone of this price."""

    layout = renamed_attribute("layout", "variant")
    why = renamed_attribute("why", "reason")

    @property
    def fits(self) -> bool:
        """True if the variant can run on the slice and its memory is sufficient."""
        return self.estimate is not None and self.estimate.fits

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "layout": self.variant,
            "on": self.on,
            "dollars": self.dollars,
            "zone": self.zone,
            "why": self.reason,
            "estimate": None if self.estimate is None else self.estimate.to_dict(),
        }


@dataclass(frozen=True)
class VariantComparison:
    """The estimates of all variants on all slices, by duration, with failures at the end."""

    choices: tuple[VariantEstimate, ...]
    tier: str

    @property
    def best(self) -> VariantEstimate | None:
        """The fastest choice that fits."""
        return self.choices[0] if self.choices and self.choices[0].fits else None

    @property
    def cheapest(self) -> VariantEstimate | None:
        """The choice that fits with the lowest price per call."""
        priced = [c for c in self.choices if c.dollars is not None and c.fits]
        return min(priced, key=lambda choice: choice.dollars or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {"tier": self.tier, "choices": [choice.to_dict() for choice in self.choices]}

    def __str__(self) -> str:
        """Return the table, with lines for variants that cannot run on a slice."""
        rows = [_table_row(choice) for choice in self.choices if choice.estimate is not None]
        headings = ["LAYOUT", "ON", "MESH", "TIME", "UNMEASURED", "MFU", "BOUND", "WAITS"]
        headings += ["MEMORY", "", "$/1000", "IN"]
        lines = format_table(headings, rows, alignment="   rrr rr r ")
        lines += [
            f"{choice.variant} on {choice.on}: {choice.reason}"
            for choice in self.choices
            if choice.estimate is None
        ]
        if rows:
            lines.append("UNMEASURED: in kinds of operation that were never measured on that chip")
        if any(choice.dollars is not None for choice in self.choices):
            lines.append(f"$/1000: of a thousand calls, at the {self.tier} price in that zone")
        return "\n".join(lines)


def _table_row(choice: VariantEstimate) -> list[str]:
    estimate = choice.estimate
    assert estimate is not None
    seconds = estimate.seconds
    return [
        choice.variant,
        choice.on,
        format_mesh(estimate.mesh) or "–",
        format_seconds(seconds),
        format_share(estimate.unmeasured_share),
        f"{100 * estimate.mfu:.0f} %",
        estimate.bound,
        f"{100 * estimate.exposed / seconds:.0f} %" if seconds else "–",
        format_bytes(estimate.memory.total),
        "fits" if estimate.fits else f"of {format_bytes(estimate.memory_limit)}",
        "–" if choice.dollars is None else f"{1000 * choice.dollars:.3g}",
        choice.zone or "–",
    ]


@renamed_keywords(layouts="variants")
def compare(
    fn: Callable[..., Any],
    variants: Iterable[ProgramVariant] | Mapping[str, Any],
    on: Sequence[str] | str,
    *,
    tier: str = "spot",
    compiler: Compiler = "auto",
    zones: Sequence[str] = (),
) -> VariantComparison:
    """Estimate all variants of a program on all slices.

    Args:
        fn: the function.
        variants: `ProgramVariant`s, or the arguments of each variant by its name:
            `{"fsdp": (state, batch), …}`. A function by name is called with the number of devices
            of each slice, and returns either.
        on: names of slices.
        tier: the capacity tier of the prices, `"spot"` or `"on-demand"`.
        compiler: as for `estimate`.
        zones: the zones that you may use. Prices are the lowest in these; by default, in the zones
            that are open to everyone, if there are any.

    Raises:
        UnknownName: there is no such slice or tier.
        UserError: there is nothing to compare. For a variant that cannot run on a slice, the table
            has the error instead.
    """
    if isinstance(on, str):
        on = [on]
    if tier not in TIERS:
        raise UnknownName(f"{tier!r} is not a tier of prices; there are {', '.join(TIERS)}")
    by_name = _variants_by_name(variants)
    machines = [parse_machine(name) for name in on]
    if not by_name or not machines:
        raise UserError("there is nothing to compare: name at least one variant and one slice")
    choices = [
        _estimate_variant(fn, name, variant, machine, tier, compiler, zones)
        for name, variant in by_name.items()
        for machine in machines
    ]
    return VariantComparison(tuple(sorted(choices, key=_order)), tier)


def _variants_by_name(variants: Iterable[ProgramVariant] | Mapping[str, Any]) -> Mapping[str, Any]:
    if isinstance(variants, Mapping):
        return variants
    listed = list(variants)
    for variant in listed:
        if not isinstance(variant, ProgramVariant):
            raise UserError(
                f"{variant!r} is no ProgramVariant; give ProgramVariants, or arguments by name"
            )
    names = [variant.name for variant in listed]
    if len(set(names)) < len(names):
        raise UserError(f"two variants have one name; they are {', '.join(names)}")
    return {variant.name: variant for variant in listed}


def _make_variant(name: str, source: Any, device_count: int) -> ProgramVariant:
    """Return a variant from a variant, arguments, or a function that returns these."""
    if callable(source):
        try:
            source = source(device_count)
        except Exception as error:  # whatever the user's function raises
            raise UserError(
                f"cannot be made for {device_count} devices: {describe_error(error)}"
            ) from error
    if isinstance(source, ProgramVariant):
        return source
    return ProgramVariant(name, source if isinstance(source, tuple) else (source,))


def _estimate_variant(
    fn: Callable[..., Any],
    name: str,
    source: Any,
    machine: Machine,
    tier: str,
    compiler: Compiler,
    zones: Sequence[str],
) -> VariantEstimate:
    try:
        variant = _make_variant(name, source, machine.devices)
        result = estimate(
            variant.function or fn,
            *variant.arguments,
            on=machine.name,
            mesh=variant.mesh,
            compiler=compiler,
        )
    except UserError as error:
        return VariantEstimate(name, machine.name, None, str(error))
    listed = _lowest_price(machine, tier, zones)
    if listed is None:
        return VariantEstimate(name, machine.name, result)
    per_chip_hour, zone = listed
    dollars = per_chip_hour * machine.chips / 3600 * result.seconds
    return VariantEstimate(name, machine.name, result, dollars=dollars, zone=zone)


def _lowest_price(machine: Machine, tier: str, zones: Sequence[str]) -> tuple[float, str] | None:
    """Return the lowest listed price of a chip-hour in zones that may be used, and its zone."""
    if machine.slice is None:
        return None
    offers = zone_offers(machine.slice)
    usable = [offer for offer in offers if (offer.zone in zones if zones else offer.public)]
    prices = [
        (listed.per_chip_hour, offer.zone)
        for offer in (usable if zones else usable or offers)
        if (listed := price(machine.slice, offer.zone, tier)) is not None
    ]
    return min(prices, default=None)


def _order(choice: VariantEstimate) -> tuple[bool, bool, float]:
    """Sort by fit, then by duration."""
    if choice.estimate is None:
        return (True, True, 0.0)
    return (False, not choice.estimate.fits, choice.estimate.seconds)
