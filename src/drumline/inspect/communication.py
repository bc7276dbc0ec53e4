"""`communication`: which collectives XLA put into a program, why, how large, over which axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drumline.errors import UserError
from drumline.inspect.collectives import KINDS, Collective, collectives_of
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler, InspectedProgram, compiled_for
from drumline.inspect.cost.machines import machine
from drumline.inspect.formatting import plural, read_size, size, table

LISTED = 40
"""Rows of a printed table: a model without loops over its layers has hundreds."""

HEADINGS = ("KIND", "AXES", "DTYPE", "SENT", "TIMES", "TOTAL", "MEANWHILE", "SOURCE", "SCOPE")
NO_OVERLAP = "The CPU's compiler overlaps nothing: estimate() says what a slice would hide."


@dataclass(frozen=True)
class Communication:
    """The collectives of one program, as one device runs it."""

    name: str
    mesh: Axes
    devices: int
    compiled_by: str
    collectives: tuple[Collective, ...] = field(repr=False)
    overlap_known: bool = True
    """Whether the compiler says what runs at the same time; the CPU's does not."""

    @property
    def sent(self) -> int:
        """Bytes that one device sends in one call."""
        return sum(collective.total for collective in self.collectives)

    @property
    def sentence(self) -> str:
        """What there is, in one sentence."""
        if not self.collectives:
            return f"{self.name} does not communicate."
        counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for collective in self.collectives:
            counts[collective.kind, collective.axes] += collective.count
        kinds = [
            f"{plural(count, kind)} over {' and '.join(axes) or 'devices'}"
            for (kind, axes), count in sorted(counts.items(), key=lambda item: -item[1])
        ]
        return f"{self.name} sends {self._about}{size(self.sent)} a device: {', '.join(kinds)}."

    @property
    def _about(self) -> str:
        """What is not known of the sum: loops of unknown length, branches that may not be taken."""
        endless = any(collective.at_least for collective in self.collectives)
        maybe = any(collective.conditional for collective in self.collectives)
        return "about " if endless and maybe else "at least " if endless else "at most " * maybe

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "name": self.name,
            "mesh": dict(self.mesh),
            "devices": self.devices,
            "compiled_by": self.compiled_by,
            "sent": self.sent,
            "sentence": self.sentence,
            "collectives": [collective.to_dict() for collective in self.collectives],
        }

    def __str__(self) -> str:
        """The sentence, and a table."""
        where = f"on {shown(self.mesh)}, " if self.mesh else ""
        lines = [self.sentence, f"{where}compiled by {self.compiled_by}"]
        if not self.collectives:
            return "\n".join(lines)
        lines += ["", *self._table()]
        if not self.overlap_known:
            lines += ["", NO_OVERLAP]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        rows: dict[tuple[str, ...], tuple[int, int]] = {}
        for one in self.collectives:
            key = (
                one.kind,
                " ".join(one.axes) or "–",
                one.dtype,
                size(one.sent),
                _hidden(one) if self.overlap_known else "–",
                "≥" if one.at_least else ("≤" if one.conditional else ""),
                one.source or "–",
                one.scope,
            )
            count, total = rows.get(key, (0, 0))
            rows[key] = (count + one.count, total + one.total)
        ordered = sorted(rows.items(), key=lambda item: -item[1][1])
        cells = [
            [kind, axes, dtype, sent, f"{sign}{count:,}", size(total), hidden, source, scope]
            for (kind, axes, dtype, sent, hidden, sign, source, scope), (count, total) in ordered
        ]
        lines = table(HEADINGS, cells[:LISTED], right="   rrr")
        if len(cells) > LISTED:
            lines.append(f"and {len(cells) - LISTED:,} more, which send less: see to_dict()")
        return lines


def _hidden(collective: Collective) -> str:
    if not collective.asynchronous:
        return "waits"
    count = len(collective.between)
    if not count:
        return "nothing"
    first = collective.between[0]
    return first if count == 1 else f"{first} +{count - 1}"


def communication(
    fn: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    on: str | None = None,
    compiler: Compiler = "auto",
) -> Communication:
    """The collectives that XLA compiles a function to.

    Args:
        fn: a function, jitted or not; a `jax.stages.Lowered`; or a `jax.stages.Compiled`.
        args: arrays, or `jax.ShapeDtypeStruct`s with shardings, which may lie on an `AbstractMesh`
            of more devices than there are.
        mesh: the mesh to trace under, as JAX has it or as `"X=2,Y=4"`; without one, that of the
            arguments or of the context.
        on: a slice, such as `"v5litepod-8"`, to ask the TPU's own compiler where it is installed.
        compiler: whose compiler to ask; by itself the TPU's for a named slice, that of this
            process's GPUs or TPUs, or else the CPU's with emulated devices.

    Raises:
        UserError: the function does not trace, or the mesh does not divide its arguments.
        UnknownName: there is no such slice.
    """
    target = None if on is None else machine(on)
    return communication_of(compiled_for(target, fn, args, mesh=mesh, compiler=compiler))


def communication_of(program: InspectedProgram) -> Communication:
    """The collectives of a compiled program."""
    return Communication(
        name=program.name,
        mesh=program.mesh,
        devices=program.devices,
        compiled_by=program.compiled_by,
        collectives=tuple(
            collectives_of(
                program.module,
                program.mesh,
                groups=program.groups,
                others=program.other_meshes,
                widened=program.widened,
            )
        ),
        overlap_known=program.compiler != "cpu",
    )


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
