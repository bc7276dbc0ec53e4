"""Cases of tests that run only with DRUMLINE_EVERY_CASE=1, as CI does after `make test`.

`make test` covers each behaviour once. More seeds, shapes and combinations of it have the mark
`every_case`, and tests/conftest.py leaves them out.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest

EVERY_CASE = "DRUMLINE_EVERY_CASE" in os.environ


def rare(*cases: Any) -> list[Any]:
    """Return cases for `parametrize` that run only with DRUMLINE_EVERY_CASE=1."""
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.every_case)
        for case in cases
    ]


def sampled(cases: Iterable[Any], sample: Collection[Any]) -> list[Any]:
    """Return cases for `parametrize`, of which `make test` runs only the sample."""
    return [case if case in sample else rare(case)[0] for case in cases]
