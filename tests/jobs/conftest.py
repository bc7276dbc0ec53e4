from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.installation import Installation, temporary_installation


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with temporary_installation(tmp_path) as new:
        yield new


@pytest.fixture(scope="module")
def shared(worker_installation: Installation) -> Iterator[Installation]:
    """An installation for all tests of a module that affect only a job and its own slice."""
    yield worker_installation
    worker_installation.clear()
