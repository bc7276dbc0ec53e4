"""Some of the thousand seeds of `tests.health.seeds`: each fault a few times, and none."""

from tests.health.seeds import FAULTS, run

SEEDS = range(1, 1 + 4 * len(FAULTS))


def test_every_planted_fault_is_blamed_on_the_right_device_and_nobody_else() -> None:
    ran, wrong = run(SEEDS)
    assert dict(ran) == dict.fromkeys(FAULTS, 4)
    assert not wrong
