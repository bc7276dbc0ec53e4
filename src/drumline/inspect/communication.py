"""`communication`: which collectives XLA put into a program, why, how large, over which axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from drumline.inspect.collectives import Collective, collectives_of
from drumline.inspect.compiled import compiled_for
from drumline.inspect.compiling.axes import Axes, shown
from drumline.inspect.compiling.meshes import MeshLike
from drumline.inspect.compiling.programs import Compiler, InspectedProgram
from drumline.inspect.cost.machines import machine
from drumline.inspect.views.words import plural, size, table

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
