"""Some of the thousand seeds of `tests.health.seeds`: four of each kind."""

from tests.health.seeds import FAULTS, run

SEEDS = range(1, 1 + 4 * len(FAULTS))


def test_every_injected_fault_names_the_right_device_and_no_other() -> None:
    counts, errors = run(SEEDS)
    assert dict(counts) == dict.fromkeys(FAULTS, 4)
    assert not errors
