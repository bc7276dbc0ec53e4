"""Training that is interrupted repeatedly ends with the same bits as an undisturbed run."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs.world import World, a_world
from tests.stories.disturbances import KINDS, Target, disturb, draw_disturbances, parameters, train

# Each test takes minutes and needs all cores.
pytestmark = pytest.mark.skipif(
    "DRUMLINE_STORIES" not in os.environ, reason="takes minutes: DRUMLINE_STORIES=1 runs it"
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with a_world(tmp_path) as made:
        yield made


@pytest.mark.parametrize(
    ("config", "steps", "save_every", "seed"),
    [
        pytest.param("digits", 100, 7, 7, id="MLP, data parallel"),
        pytest.param("lm_tiny", 40, 4, 0, id="LM, FSDP × tensor parallel"),
    ],
)
def test_five_disturbances_change_no_bit(
    world: World, config: str, steps: int, save_every: int, seed: int
) -> None:
    undisturbed = parameters(world, train(world, config, steps=steps, save_every=save_every))
    rng = random.Random(seed)
    disturbances = draw_disturbances(len(KINDS), steps, rng)
    job = train(world, config, steps=steps, save_every=save_every)
    disturbed = disturb(Target(world, job, rng), disturbances)
    assert all(attempt["outcome"] != "succeeded" for attempt in disturbed)
    assert parameters(world, job) == undisturbed, ", ".join(map(str, disturbances))
    world.cloud_is_empty()
