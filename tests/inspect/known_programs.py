"""The table of small programs with known communication.

Each row was derived from the shardings and the ring algorithm before it was compiled. If XLA for
CPU devices does otherwise, the row states the difference and the reason.
"""

from __future__ import annotations

from tests.inspect.expected import Program
from tests.inspect.jitted_programs import JITTED
from tests.inspect.looped_programs import LOOPED
from tests.inspect.mapped_programs import MAPPED
from tests.inspect.training_programs import TRAINING
from tests.inspect.transformed_programs import TRANSFORMED

PROGRAMS: tuple[Program, ...] = (*MAPPED, *JITTED, *LOOPED, *TRANSFORMED, *TRAINING)


def program_named(name: str) -> Program:
    """Return the program of that name."""
    (program,) = (program for program in PROGRAMS if program.name == name)
    return program
