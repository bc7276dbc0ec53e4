"""The job file: read YAML and return a JobSpec, or report every error with its line.

`reading` reads the file, `model` defines its keys, and `zones` lists the slices it can run on.
"""

from drumline.jobs.spec.model import JobSpec, Python, Retry
from drumline.jobs.spec.problems import Problem, SpecError
from drumline.jobs.spec.reading import amend, changes, load, parse, slice_settings, validate

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
    "slice_settings",
    "validate",
]
