"""Training that is interrupted repeatedly ends with the same bits as an undisturbed run."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.installation import Installation, temporary_installation
from tests.stories.disturbances import KINDS, Target, disturb, draw_disturbances, parameters, train

# Each test takes minutes and needs all cores.
pytestmark = pytest.mark.skipif(
    "DRUMLINE_STORIES" not in os.environ, reason="takes minutes: DRUMLINE_STORIES=1 runs it"
)


@pytest.fixture
def installation(tmp_path: Path) -> Iterator[Installation]:
    with temporary_installation(tmp_path) as new:
        yield new


@pytest.mark.parametrize(
    ("config", "steps", "save_every", "seed"),
    [
        pytest.param("digits", 100, 7, 7, id="MLP, data parallel"),
        pytest.param("lm_tiny", 40, 4, 0, id="LM, FSDP × tensor parallel"),
    ],
)
def test_five_disturbances_change_no_bit(
    installation: Installation, config: str, steps: int, save_every: int, seed: int
) -> None:
    undisturbed = parameters(
        installation, train(installation, config, steps=steps, save_every=save_every)
    )
    rng = random.Random(seed)
    disturbances = draw_disturbances(len(KINDS), steps, rng)
    job = train(installation, config, steps=steps, save_every=save_every)
    disturbed = disturb(Target(installation, job, rng), disturbances)
    assert all(attempt["outcome"] != "succeeded" for attempt in disturbed)
    assert parameters(installation, job) == undisturbed, ", ".join(map(str, disturbances))
    installation.cloud_is_empty()
