"""The table of small programs whose communication is known by theory.

Each row was derived before it was compiled, from the layouts and the ring algorithm alone. Where
XLA for CPU devices does otherwise, the row says what it does and why.
"""

from __future__ import annotations

from tests.inspect.expected import Program
from tests.inspect.jitted_programs import JITTED
from tests.inspect.looped_programs import LOOPED
from tests.inspect.mapped_programs import MAPPED
from tests.inspect.training_programs import TRAINING
from tests.inspect.transformed_programs import TRANSFORMED

PROGRAMS: tuple[Program, ...] = (*MAPPED, *JITTED, *LOOPED, *TRANSFORMED, *TRAINING)


def known(name: str) -> Program:
    """The program of that name."""
    (program,) = (program for program in PROGRAMS if program.name == name)
    return program
