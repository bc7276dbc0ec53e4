"""`drumline chips`: list the chips, or show one chip or slice in detail."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from drumline.cli.rendering.text import print_table

if TYPE_CHECKING:
    from drumline.chips import Chip, Slice

BASELINE = "A100"


def chips(
    name: Annotated[
        str | None,
        typer.Argument(help="A slice (v4-128) or a chip (v4, H100). Default: all chips."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Compare chips, or show the size, zones and prices of a slice."""
    from drumline.chips import UnknownName, chip, slice_of

    if name is None:
        _show_all(as_json)
        return
    try:
        selected = chip(name)
    except UnknownName:
        if "-" not in name:
            raise
        _show_slice(slice_of(name), as_json)
    else:
        _show_chip(selected, as_json)


def _show_all(as_json: bool) -> None:
    from drumline.chips import chip, chips

    baseline = chip(BASELINE).peak_bf16_flops
    rows = [
        {
            "rank": rank,
            **_chip_facts(chip),
            f"relative_to_{BASELINE.lower()}": round(chip.peak_bf16_flops / baseline, 4),
        }
        for rank, chip in enumerate(chips(), start=1)
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    print_table(
        ["RANK", "CHIP", "YEAR", "PEAK BF16", "MEMORY", f"OF AN {BASELINE}"],
        [
            [
                str(row["rank"]),
                row["name"],
                str(row["year"]),
                f"{row['peak_bf16_flops'] / 1e12:,.0f} TFLOP/s",
                f"{row['hbm_bytes'] / 1e9:.0f} GB",
                f"{row[f'relative_to_{BASELINE.lower()}']:.0%}",
            ]
            for row in rows
        ],
        right="r rrrr",
    )
    typer.echo("\none chip with sources: drumline chips v3 · a slice: drumline chips v4-128")


def _chip_facts(chip: "Chip") -> dict[str, Any]:
    return {
        "name": chip.name,
        "kind": chip.kind,
        "year": chip.year,
        "peak_bf16_flops": chip.peak_bf16_flops,
        "peak_8bit_flops": chip.peak_8bit_flops,
        "peak_int8_flops": chip.peak_int8_flops,
        "peak_fp8_flops": chip.peak_fp8_flops,
        "hbm_bytes": int(chip.hbm_bytes),
        "hbm_bandwidth": chip.hbm_bandwidth,
        "link_bandwidth": chip.link_bandwidth,
        "torus_dimensions": chip.torus_dimensions,
        "cores": chip.cores,
        "dcn_bandwidth": chip.dcn_bandwidth,
        "sources": dict(chip.sources),
        "notes": list(chip.notes),
    }


def _show_chip(chip: "Chip", as_json: bool) -> None:
    facts = _chip_facts(chip)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    labelled = {
        "peak_bf16_flops": ("bf16", _rate(chip.peak_bf16_flops, "FLOP/s")),
        "peak_int8_flops": ("int8", _rate(chip.peak_int8_flops, "OP/s")),
        "peak_fp8_flops": ("fp8", _rate(chip.peak_fp8_flops, "FLOP/s")),
        "hbm_bytes": ("memory", f"{chip.hbm_bytes / 1e9:.0f} GB"),
        "hbm_bandwidth": ("memory rate", _rate(chip.hbm_bandwidth, "B/s")),
        "link_bandwidth": ("link, one way", _rate(chip.link_bandwidth, "B/s")),
        "torus_dimensions": (
            "torus",
            f"{chip.torus_dimensions}D" if chip.torus_dimensions else "–",
        ),
        "cores": ("cores", str(chip.cores or "–")),
        "dcn_bandwidth": ("network", _rate(chip.dcn_bandwidth, "B/s")),
        "year": ("year", str(chip.year)),
    }
    typer.secho(f"{chip.name} · one chip", bold=True)
    print_table(
        ["FIGURE", "", "SOURCE"],
        [[label, value, chip.source_of(figure)] for figure, (label, value) in labelled.items()],
        right=" r",
    )
    for note in chip.notes:
        typer.echo(f"note: {note}")


def _rate(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G")):
        if value >= scale:
            return f"{value / scale:,.4g} {prefix}{unit}"
    return f"{value:,.0f} {unit}"


def _slice_facts(tpu_slice: "Slice") -> dict[str, Any]:
    from drumline.chips import price, zone_offers

    offers = []
    for offer in zone_offers(tpu_slice):
        facts: dict[str, Any] = {"zone": offer.zone, "public": offer.public, "source": offer.source}
        for tier in ("on-demand", "spot"):
            tier_price = price(tpu_slice, offer.zone, tier)
            facts[f"{tier.replace('-', '_')}_per_hour"] = (
                None if tier_price is None else round(tier_price.per_chip_hour * tpu_slice.chips, 4)
            )
            if tier_price is not None:
                facts |= {"price_as_of": tier_price.as_of, "price_source": tier_price.source}
        offers.append(facts)
    return {
        "name": tpu_slice.name,
        "generation": tpu_slice.generation,
        "chips": tpu_slice.chips,
        "cores": tpu_slice.cores,
        "hosts": tpu_slice.hosts,
        "chips_per_host": tpu_slice.chips_per_host,
        "topology": list(tpu_slice.topology),
        "wraps": list(tpu_slice.wraps),
        "hbm_bytes": int(tpu_slice.hbm_bytes),
        "peak_bf16_flops": tpu_slice.peak_bf16_flops,
        "runtime_image": tpu_slice.runtime_image,
        "zones": [offer["zone"] for offer in offers],
        "offers": offers,
    }


def _show_slice(tpu_slice: "Slice", as_json: bool) -> None:
    facts = _slice_facts(tpu_slice)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    wrapped = [axis.name for axis in tpu_slice.mesh_axes() if axis.wraps]
    shape = "×".join(map(str, tpu_slice.topology))
    typer.secho(f"{tpu_slice.name} · {tpu_slice.generation}", bold=True)
    typer.echo(f"chips     {_count(tpu_slice.chips, 'chip')}, {_count(tpu_slice.cores, 'core')}")
    per_host = _count(tpu_slice.chips_per_host, "chip")
    typer.echo(f"hosts     {_count(tpu_slice.hosts, 'host')} with {per_host}")
    typer.echo(f"topology  {shape}, wraps around on {', '.join(wrapped) or 'no axis'}")
    typer.echo(f"memory    {tpu_slice.hbm_bytes / 1e9:,.0f} GB")
    typer.echo(f"peak      {_rate(tpu_slice.peak_bf16_flops, 'FLOP/s')} bf16")
    typer.echo(f"image     {tpu_slice.runtime_image or 'none: not served by the Cloud TPU API'}")
    typer.echo("")
    print_table(
        ["ZONE", "SPOT AN HOUR", "ON DEMAND AN HOUR", "OPEN TO"],
        [
            [
                offer["zone"],
                _dollars(offer["spot_per_hour"]),
                _dollars(offer["on_demand_per_hour"]),
                "everyone" if offer["public"] else "projects with a grant there",
            ]
            for offer in facts["offers"]
        ],
        right=" rr",
    )
    priced = next((offer for offer in facts["offers"] if "price_as_of" in offer), None)
    if priced:
        typer.echo(f"\nprices of {priced['price_as_of']}: {priced['price_source']}")


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _dollars(amount: float | None) -> str:
    return "–" if amount is None else f"${amount:,.2f}"
