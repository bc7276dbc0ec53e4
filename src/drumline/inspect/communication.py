"""`communication` lists the collectives of a program. `expect_communication` tests them.

A test names kinds of collectives, mesh axes and bytes, which do not depend on the version of XLA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from drumline.errors import UserError
from drumline.inspect.collectives import COLLECTIVE_KINDS, Collective, find_collectives
from drumline.inspect.compiling.axes import MeshAxes, format_mesh
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler, InspectedProgram, compile_for
from drumline.inspect.cost.machines import parse_machine
from drumline.inspect.formatting import format_bytes, format_count, format_table, parse_bytes

MAX_ROWS = 40
"""The maximum number of rows of a table. A model without a scan over its layers has hundreds."""

HEADINGS = ("KIND", "AXES", "DTYPE", "SENT", "TIMES", "TOTAL", "MEANWHILE", "SOURCE", "SCOPE")
NO_OVERLAP = "The CPU's compiler overlaps nothing: estimate() says what a slice would hide."


@dataclass(frozen=True)
class Communication:
    """The collectives of a program on a device."""

    name: str
    mesh: MeshAxes
    devices: int
    compiled_by: str
    collectives: tuple[Collective, ...] = field(repr=False)
    overlap_known: bool = True
    """True if the program shows the overlap of collectives, unlike that of the CPU's compiler."""

    @property
    def sent(self) -> int:
        """Bytes that a device sends per call."""
        return sum(collective.total for collective in self.collectives)

    @property
    def sentence(self) -> str:
        """A summary in a sentence."""
        if not self.collectives:
            return f"{self.name} does not communicate."
        counts: Counter[tuple[str, tuple[str, ...]]] = Counter()
        for collective in self.collectives:
            counts[collective.kind, collective.axes] += collective.count
        kinds = ", ".join(
            f"{format_count(count, kind)} over {' and '.join(axes) or 'devices'}"
            for (kind, axes), count in sorted(counts.items(), key=lambda item: -item[1])
        )
        at_least = any(collective.at_least for collective in self.collectives)
        at_most = any(collective.conditional for collective in self.collectives)
        bound = "at least " if at_least else "at most " if at_most else ""
        if at_least and at_most:
            bound = "about "
        return f"{self.name} sends {bound}{format_bytes(self.sent)} a device: {kinds}."

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON values."""
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
        """Return the summary and a table."""
        mesh = f"on {format_mesh(self.mesh)}, " if self.mesh else ""
        lines = [self.sentence, f"{mesh}compiled by {self.compiled_by}"]
        if not self.collectives:
            return "\n".join(lines)
        lines += ["", *self._table()]
        if not self.overlap_known:
            lines += ["", NO_OVERLAP]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        totals: dict[tuple[str, ...], tuple[int, int]] = {}
        for collective in self.collectives:
            row = (
                collective.kind,
                " ".join(collective.axes) or "–",
                collective.dtype,
                format_bytes(collective.sent),
                _overlap(collective) if self.overlap_known else "–",
                "≥" if collective.at_least else ("≤" if collective.conditional else ""),
                collective.source or "–",
                collective.scope,
            )
            count, sent = totals.get(row, (0, 0))
            totals[row] = (count + collective.count, sent + collective.total)
        rows = []
        for key, (count, total) in sorted(totals.items(), key=lambda item: -item[1][1]):
            kind, names, dtype, sent_once, overlap, sign, source, scope = key
            count_text, sum_sent = f"{sign}{count:,}", format_bytes(total)
            rows.append(
                [kind, names, dtype, sent_once, count_text, sum_sent, overlap, source, scope]
            )
        lines = format_table(HEADINGS, rows[:MAX_ROWS], alignment="   rrr")
        if len(rows) > MAX_ROWS:
            lines.append(f"and {len(rows) - MAX_ROWS:,} more, which send less: see to_dict()")
        return lines


def _overlap(collective: Collective) -> str:
    if not collective.asynchronous:
        return "waits"
    if not collective.between:
        return "nothing"
    first, *others = collective.between
    return f"{first} +{len(others)}" if others else first


def communication(
    fn: Any,
    *args: Any,
    mesh: MeshLike | None = None,
    on: str | None = None,
    compiler: Compiler = "auto",
) -> Communication:
    """Compile a function and return its collectives.

    Args:
        fn: a function, jitted or not, a `jax.stages.Lowered` or a `jax.stages.Compiled`.
        args: arrays, or `jax.ShapeDtypeStruct`s with shardings. These may refer to an
            `AbstractMesh` of more devices than there are.
        mesh: the mesh to trace under, a JAX mesh or a text such as `"X=2,Y=4"`. The default is the
            mesh of the arguments or of the context.
        on: a slice such as `"v5litepod-8"`, to use the TPU's own compiler if it is installed.
        compiler: the compiler to use. The default is the TPU's for a named slice, else that of this
            process's GPUs or TPUs, else the CPU's with emulated devices.

    Raises:
        UserError: the function does not trace, or the mesh does not divide its arguments.
        UnknownName: there is no such slice.
    """
    machine = None if on is None else parse_machine(on)
    return communication_of(compile_for(machine, fn, args, mesh=mesh, compiler=compiler))


def communication_of(program: InspectedProgram) -> Communication:
    """Return the collectives of a compiled program."""
    collectives = find_collectives(
        program.module,
        program.mesh,
        numbering_mesh=program.numbering_mesh,
        other_meshes=program.other_meshes,
        widened=program.widened,
    )
    return Communication(
        name=program.name,
        mesh=program.mesh,
        devices=program.devices,
        compiled_by=program.compiled_by,
        collectives=tuple(collectives),
        overlap_known=program.compiler != "cpu",
    )


# Tests of a program's communication -------------------------------------------------------------

Limit = str | int | None
Allowed = Mapping[str, Limit | Mapping[str | tuple[str, ...], Limit]] | Iterable[str]

_AxesKey = tuple[str, ...] | None
"""Sorted axis names, or None for any axes."""


class UnexpectedCommunication(AssertionError):
    """A program has collectives that its test does not allow."""


def expect_communication(
    fn: Any,
    *args: Any,
    allow: Allowed = (),
    forbid: str | Iterable[str] = (),
    mesh: MeshLike | None = None,
) -> Communication:
    """Compare a program's collectives with the allowed ones, and return them.

    Args:
        fn: as for `communication`.
        args: as for `communication`.
        allow: the allowed kinds, with their axes and the bytes that a device may send per call:
            `{"all-gather": {"Y": "8 MiB"}}`. `{"all-gather": "8 MiB"}` allows any axes, and
            `["all-gather"]` any size. Write several axes as `"X,Y"`. All else is forbidden.
        forbid: `"all"`, or the forbidden kinds. All other kinds are allowed.
        mesh: as for `communication`.

    Raises:
        UnexpectedCommunication: a collective is not allowed. The message lists each violation and
            the table of collectives.
        UserError: `allow` or `forbid` is malformed.
    """
    limits = _parse_limits(allow)
    forbidden = set(COLLECTIVE_KINDS.values()) if forbid == "all" else set(_check_kinds(forbid))
    if limits and forbidden:
        raise UserError("give either allow= or forbid=: all that is not allowed is forbidden")
    report = communication(fn, *args, mesh=mesh)
    if forbidden:
        violations = [
            _violation(collective, "is forbidden")
            for collective in report.collectives
            if collective.kind in forbidden
        ]
    else:
        violations = _limit_violations(report, limits)
    if violations:
        raise UnexpectedCommunication("\n".join([*violations, "", str(report)]))
    return report


def _check_kinds(kinds: str | Iterable[str]) -> list[str]:
    if not isinstance(kinds, Iterable):
        raise UserError(f"{kinds!r} is not a list of kinds of collectives")
    names = [kinds] if isinstance(kinds, str) else list(kinds)
    valid = sorted(set(COLLECTIVE_KINDS.values()))
    for name in names:
        if name not in valid:
            raise UserError(f"{name!r} is not a kind of collective; there are {', '.join(valid)}")
    return names


def _parse_limits(allow: Allowed) -> dict[str, dict[_AxesKey, int | None]]:
    """Return the limits in bytes by kind and axes. None means no limit."""
    if isinstance(allow, str) or not isinstance(allow, Mapping):
        return {kind: {None: None} for kind in _check_kinds(allow)}
    _check_kinds(allow.keys())
    return {kind: _parse_kind_limits(kind, limits) for kind, limits in allow.items()}


def _parse_kind_limits(
    kind: str, limits: Limit | Mapping[str | tuple[str, ...], Limit]
) -> dict[_AxesKey, int | None]:
    if not isinstance(limits, Mapping):
        return {None: _parse_limit(kind, limits)}
    by_axes: dict[_AxesKey, int | None] = {}
    for axes, limit in limits.items():
        names = axes if isinstance(axes, tuple) else str(axes).split(",")
        key = tuple(sorted(str(name).strip() for name in names))
        by_axes[key] = _parse_limit(f"{kind} over {axes}", limit)
    return by_axes


def _parse_limit(subject: str, limit: Limit) -> int | None:
    if limit is None:
        return None
    try:
        return parse_bytes(limit)
    except ValueError:
        raise UserError(
            f"{subject}: {limit!r} is not a size; write it as '8 MiB' or in bytes"
        ) from None


def _limit_violations(
    report: Communication, limits: dict[str, dict[_AxesKey, int | None]]
) -> list[str]:
    """Return a line per violation: a collective that is not allowed, or an exceeded limit."""
    lines = []
    limited: dict[tuple[str, _AxesKey], list[Collective]] = {}
    for collective in report.collectives:
        axes = tuple(sorted(collective.axes))
        allowed = limits.get(collective.kind, {})
        key: _AxesKey = axes if axes in allowed else None
        if key not in allowed:
            lines.append(_violation(collective, "is not allowed"))
            continue
        limited.setdefault((collective.kind, key), []).append(collective)
    for (kind, key), collectives in limited.items():
        limit = limits[kind][key]
        if limit is None:
            continue
        total = sum(collective.total for collective in collectives)
        subject = f"{kind} over {' and '.join(key)}" if key else kind
        unbounded = [collective for collective in collectives if collective.at_least]
        if unbounded:
            lines.append(
                f"{subject}: within {format_bytes(limit)} only if its loop ends soon enough"
            )
            lines += [f"  {_violation(c, 'may run more often')}" for c in unbounded]
        elif total > limit:
            lines.append(
                f"{subject}: {format_bytes(total)} a device, and {format_bytes(limit)} are allowed"
            )
            lines += [f"  {_violation(c, 'counts')}" for c in collectives]
    return lines


def _violation(collective: Collective, verdict: str) -> str:
    axes = " and ".join(collective.axes) or "the devices"
    at_least = "at least " if collective.at_least else ""
    sent = format_bytes(collective.sent)
    times = f" × {collective.count:,}" if collective.count != 1 else ""
    source = f" at {collective.source}" if collective.source else ""
    return (
        f"{collective.kind} over {axes} of {collective.dtype}, {at_least}{sent}{times},"
        f"{source} {verdict}"
    )
