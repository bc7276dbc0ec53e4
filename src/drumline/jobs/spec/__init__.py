"""The job file: YAML in, a JobSpec out, or every mistake with its line.

`reading` reads it, `model` defines the keys, `places` says where such a job may run.
"""

from drumline.jobs.spec.changes import changes
from drumline.jobs.spec.model import JobSpec, Python, Retry
from drumline.jobs.spec.problems import Problem, SpecError
from drumline.jobs.spec.reading import amend, load, parse, validate

__all__ = [
    "JobSpec",
    "Problem",
    "Python",
    "Retry",
    "SpecError",
    "amend",
    "changes",
    "load",
    "parse",
    "validate",
]
