"""The checks of accelerators and zones in a job file, against the catalogue of chips."""

from collections.abc import Sequence

from drumline import chips
from drumline.jobs.spec.checks import Wrong, each, plain, several, shown, text, unique

ANY = "any"
# Longer lists are cut: `drumline chips NAME` prints all.
_ZONES_SHOWN = 6


def accelerators(value: object) -> tuple[str, ...]:
    """Slices in order of preference, under the names the Cloud TPU API takes."""
    return unique(each(enumerate(several(value)), _accelerator))


def _accelerator(value: object) -> str:
    if isinstance(plain(value), int | float):
        raise Wrong(f"{shown(value)} is no slice; one looks like v4-8")
    name = text(value)
    if len(name) > 60 or not name.isprintable():
        raise Wrong(f"{shown(name)} is no accelerator; one looks like v4-8 or v5litepod-16")
    try:
        found = chips.slice_of(name)
    except chips.UnknownName as unknown:
        raise Wrong(str(unknown)) from None
    if found.runtime_image is None:
        raise Wrong(f"{found.name} is to be had on GKE only, not through the Cloud TPU API")
    return found.name


def zones(value: object, wanted: Sequence[str] | None) -> str | tuple[str, ...]:
    """`any`, or zones in order of preference, each with one of the wanted slices.

    `wanted` is None where the accelerators themselves are wrong: then only the zones are checked.
    """
    if isinstance(value, str) and value.strip() == ANY:
        return ANY
    found = each(enumerate(several(value)), lambda entry: _zone(entry, wanted))
    return unique(found)


def _zone(value: object, wanted: Sequence[str] | None) -> str:
    if isinstance(plain(value), int | float):
        raise Wrong(f"{shown(value)} is no zone; one looks like us-central2-b")
    written = text(value)
    zone = written.strip().casefold()
    if zone == ANY:
        raise Wrong("any stands alone; write zones: any")
    if len(zone) > 60 or not zone.isprintable():
        raise Wrong(f"{shown(written)} is no zone; one looks like us-central2-b")
    if zone in chips.LOCAL_ZONES:
        return zone
    there = places_of(wanted or ())
    try:
        chips.region_of(zone)
    except chips.UnknownName as unknown:
        inside = [candidate for candidate in there if candidate.startswith(f"{zone}-")]
        if "is a region" in str(unknown) and wanted:
            what = _kinds(wanted)
            if inside:
                raise Wrong(
                    f"{shown(zone)} is a region; its zones with {what}: {_cut(inside)}"
                ) from None
            raise Wrong(f"{shown(zone)} is a region without {what}; {_where(wanted)}") from None
        raise Wrong(str(unknown)) from None
    if wanted and zone not in there:
        raise Wrong(f"{zone} has no {_missing(zone, wanted)}; {_where(wanted)}")
    return zone


def places_of(wanted: Sequence[str]) -> list[str]:
    """Every zone with one of these slices, by preference, those open to everyone first."""
    found = (offer.zone for name in wanted for offer in chips.zone_offers(chips.slice_of(name)))
    return list(dict.fromkeys(found))


def _kinds(wanted: Sequence[str]) -> str:
    return " or ".join(dict.fromkeys(chips.slice_of(name).generation for name in wanted))


def _missing(zone: str, wanted: Sequence[str]) -> str:
    """What the zone does not have: the generation, or this size of it."""
    here = chips.generations_in(zone)
    slices = [chips.slice_of(name) for name in wanted]
    names = (
        tpu_slice.name if tpu_slice.generation in here else tpu_slice.generation
        for tpu_slice in slices
    )
    return " or ".join(dict.fromkeys(names))


def _where(wanted: Sequence[str]) -> str:
    """Where to find these slices instead."""
    if len(wanted) == 1:
        return f"zones with it: {_cut(places_of(wanted), wanted[0])}"
    return "; ".join(f"zones with {name}: {_cut(places_of([name]), name)}" for name in wanted)


def _cut(zones: Sequence[str], name: str | None = None) -> str:
    if len(zones) <= _ZONES_SHOWN:
        return ", ".join(zones)
    more = f", … (all: drumline chips {name})" if name else ", …"
    return ", ".join(zones[:_ZONES_SHOWN]) + more


def check_hosts(wanted: Sequence[str], numbers: Sequence[int]) -> None:
    """Raise unless every wanted slice has these hosts."""
    flaws: list[tuple[tuple[str | int, ...], str]] = []
    for at, number in enumerate(numbers):
        for name in wanted:
            count = chips.slice_of(name).hosts
            if number >= count:
                has = "one host, 0" if count == 1 else f"hosts 0 to {count - 1}"
                flaws.append(((at,), f"{name} has no host {number}; it has {has}"))
                break
    if flaws:
        raise Wrong.all_of(flaws)
