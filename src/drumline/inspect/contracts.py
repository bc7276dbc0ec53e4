"""`expect_communication`: a test that fails when a change makes XLA communicate more.

A contract is written in kinds, mesh axes and bytes, which outlive XLA's versions and spellings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from drumline.errors import UserError
from drumline.inspect.collectives import KINDS, Collective
from drumline.inspect.communication import Communication, communication
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.views.words import read_size, size

Limit = str | int | None
Allowed = Mapping[str, Limit | Mapping[str | tuple[str, ...], Limit]] | Iterable[str]


class UnexpectedCommunication(AssertionError):
    """A program communicates what its contract does not allow."""


def expect_communication(
    fn: Any,
    *args: Any,
    allow: Allowed = (),
    forbid: str | Iterable[str] = (),
    mesh: MeshLike | None = None,
) -> Communication:
    """Check a program's collectives against what is allowed, and return them.

    Args:
        fn: as for `communication`.
        args: as for `communication`.
        allow: kinds, the axes each may run over, and how many bytes one device may send over them
            in one call: `{"all-gather": {"Y": "8 MiB"}}`; `{"all-gather": "8 MiB"}` over any axes,
            `["all-gather"]` without a limit. Several axes at once are `"X,Y"`. What is not
            allowed is forbidden.
        forbid: `"all"`, or kinds that must not appear, everything else being allowed.
        mesh: as for `communication`.

    Raises:
        UnexpectedCommunication: with the lines that broke the contract, and the table.
        UserError: the contract itself makes no sense.
    """
    limits = _limits(allow)
    forbidden = set(KINDS.values()) if forbid == "all" else set(_kinds(forbid))
    if limits and forbidden:
        raise UserError("give either allow= or forbid=: what is not allowed is forbidden")
    report = communication(fn, *args, mesh=mesh)
    broken = (
        [_line(one, "is forbidden") for one in report.collectives if one.kind in forbidden]
        if forbidden
        else _beyond(report, limits)
    )
    if broken:
        raise UnexpectedCommunication("\n".join([*broken, "", str(report)]))
    return report


def _kinds(given: str | Iterable[str]) -> list[str]:
    if not isinstance(given, Iterable):
        raise UserError(f"{given!r} names no kinds of collectives; give a list of them")
    names = [given] if isinstance(given, str) else list(given)
    known = sorted(set(KINDS.values()))
    for name in names:
        if name not in known:
            raise UserError(f"{name!r} is no kind of collective; there are {', '.join(known)}")
    return names


_Key = tuple[str, ...] | None


def _limits(allow: Allowed) -> dict[str, dict[_Key, int | None]]:
    """Bytes by kind and axes; None as a key is any axes, None as a value no limit."""
    if isinstance(allow, str) or not isinstance(allow, Mapping):
        return {kind: {None: None} for kind in _kinds(allow)}
    _kinds(allow.keys())
    return {kind: _by_axes(kind, given) for kind, given in allow.items()}


def _by_axes(kind: str, given: Any) -> dict[_Key, int | None]:
    if not isinstance(given, Mapping):
        return {None: _bytes(kind, given)}
    found: dict[_Key, int | None] = {}
    for axes, limit in given.items():
        parts = axes if isinstance(axes, tuple) else str(axes).split(",")
        names = tuple(str(name).strip() for name in parts)
        found[tuple(sorted(names))] = _bytes(f"{kind} over {axes}", limit)
    return found


def _bytes(what: str, limit: Any) -> int | None:
    if limit is None:
        return None
    try:
        return read_size(limit)
    except ValueError:
        raise UserError(f"{what}: {limit!r} is no size; write it as '8 MiB' or in bytes") from None


def _beyond(report: Communication, limits: dict[str, dict[_Key, int | None]]) -> list[str]:
    """A line for each collective that nothing allows, and for each sum beyond its limit."""
    lines = []
    sums: dict[tuple[str, _Key], list[Collective]] = {}
    for one in report.collectives:
        axes = tuple(sorted(one.axes))
        allowed = limits.get(one.kind, {})
        key: _Key = axes if axes in allowed else None
        if key not in allowed:
            lines.append(_line(one, "is not allowed"))
            continue
        sums.setdefault((one.kind, key), []).append(one)
    for (kind, key), members in sums.items():
        limit, total = limits[kind][key], sum(one.total for one in members)
        over = f" over {' and '.join(key)}" if key else ""
        endless = [one for one in members if one.at_least]
        if limit is not None and endless:
            lines.append(f"{kind}{over}: within {size(limit)} only if its loop ends soon enough")
            lines += [f"  {_line(one, 'may run more often')}" for one in endless]
        elif limit is not None and total > limit:
            lines.append(f"{kind}{over}: {size(total)} a device, and {size(limit)} are allowed")
            lines += [f"  {_line(one, 'counts')}" for one in members]
    return lines


def _line(one: Collective, verdict: str) -> str:
    times = f" × {one.count:,}" if one.count != 1 else ""
    least = "at least " if one.at_least else ""
    where = f" at {one.source}" if one.source else ""
    axes = " and ".join(one.axes) or "the devices"
    return (
        f"{one.kind} over {axes} of {one.dtype}, {least}{size(one.sent)}{times},{where} {verdict}"
    )
