"""Some nights in every run of the tests, and proof that bugs put back are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SEEDS, AT_A_TIME = 60, 15
QUICKLY_FOUND = (
    "releases_are_dropped",
    "preemptions_count_as_failures",
    "a_gap_in_one_listing_counts_as_gone",
    "secrets_are_never_deleted",
    "requests_are_not_saved",
    "failures_are_not_counted",
    "decisions_use_stale_records",
)
"""Found by the first schedules already; `python -m tests.simulation.mutations` takes on all."""


def simulation(*words: str) -> "subprocess.CompletedProcess[str]":
    """In a process of its own, whose sets of names have a fixed order."""
    command = [sys.executable, "-m", *words]
    environment_variables = os.environ | {"PYTHONHASHSEED": "0"}
    return subprocess.run(
        command, cwd=ROOT, env=environment_variables, capture_output=True, text=True, check=False
    )


@pytest.mark.long
@pytest.mark.parametrize("first", range(1, SEEDS + 1, AT_A_TIME))
def test_no_schedule_violates_an_invariant(first: int) -> None:
    words = ("--seeds", str(AT_A_TIME), "--first", str(first), "--workers", "1")
    done = simulation("tests.simulation", *words)
    assert done.stdout.endswith(f"{AT_A_TIME} schedules, 0 broken\n"), done.stdout + done.stderr


def test_the_same_seed_gives_the_same_schedule_in_another_process() -> None:
    nights = {simulation("tests.simulation", "--replay", "3").stdout for _ in range(2)}
    (night,) = nights
    assert "fingerprint" in night.splitlines()[-1]


def test_planted_bugs_are_found() -> None:
    done = simulation(
        "tests.simulation.mutations", "--workers", "1", "--seeds", "20", *QUICKLY_FOUND
    )
    assert done.stdout.endswith("0 not found\n"), done.stdout + done.stderr
