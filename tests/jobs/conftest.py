from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.installation import Installation, temporary_installation


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with temporary_installation(tmp_path) as new:
        yield new
